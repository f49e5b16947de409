import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createSecureServer, type Http2SecureServer, type ServerHttp2Session } from "node:http2";
import type { AddressInfo } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test, type TestContext } from "node:test";
import { setTimeout as delay } from "node:timers/promises";
import { connect, formatJoin, UnimplementedError, type Client, type ConnectOptions } from "../src/index.js";

/** A certificate of its own authority, and its key, in PEM. */
interface Proof {
  cert: string;
  key: string;
}

/** What a server shows and asks for, and what the files of its callers say. */
interface State {
  shown: Proof;
  clients?: Proof;
  moves?: boolean;
  serverName?: string;
  token?: string;
}

function proofFor(name: string): Proof {
  const folder = mkdtempSync(join(tmpdir(), "astraflow-"));
  const [cert, key] = [join(folder, "cert"), join(folder, "key")];
  const kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"];
  const names = ["-subj", `/CN=${name}`, "-addext", `subjectAltName=DNS:${name}`];
  execFileSync("openssl", ["req", "-x509", ...kind, ...names, "-keyout", key, "-out", cert], { stdio: "pipe" });
  const made = { cert: readFileSync(cert, "utf8"), key: readFileSync(key, "utf8") };
  rmSync(folder, { recursive: true });
  return made;
}

/** A server that can become another one, and the files by which a client reaches it. */
class World {
  readonly tokens: (string | undefined)[] = [];
  readonly folder = mkdtempSync(join(tmpdir(), "astraflow-"));
  #server: Http2SecureServer | undefined;
  readonly #sessions = new Set<ServerHttp2Session>();
  #port = 0;

  constructor(context: TestContext) {
    context.after(() => {
      this.stop();
      rmSync(this.folder, { recursive: true });
    });
  }

  async serve({ shown, clients, moves = false }: State): Promise<void> {
    this.stop();
    const asks = clients ? { ca: clients.cert, requestCert: true, rejectUnauthorized: true } : {};
    const server = (this.#server = createSecureServer({ ...shown, ...asks }));
    server.on("session", (session) => this.#sessions.add(session));
    server.on("stream", (stream, headers) => {
      this.tokens.push(headers.authorization);
      stream.respond({ ":status": 200, "content-type": "application/grpc", "grpc-status": "12" }, { endStream: true });
    });
    server.listen(moves ? 0 : this.#port, "127.0.0.1");
    await once(server, "listening");
    this.#port = (server.address() as AddressInfo).port;
  }

  stop(): void {
    this.#server?.close();
    for (const session of this.#sessions) session.destroy();
    this.#sessions.clear();
  }

  write({ shown, clients, serverName = "localhost", token = "" }: State): void {
    const ca = [Buffer.from(shown.cert.replace(/-----.*-----|\n/g, ""), "base64")];
    const said = formatJoin({ address: `127.0.0.1:${this.#port}`, ca, publicCa: false, serverName, token });
    for (const [name, content] of Object.entries({ join: said, ca: shown.cert, cert: clients?.cert, key: clients?.key }))
      if (content !== undefined) writeFileSync(this.path(name), content);
  }

  path(name: string): string {
    return join(this.folder, name);
  }

  dial(files: (keyof ConnectOptions)[]): Client {
    const names = { joinFile: "join", caFile: "ca", clientCertFile: "cert", clientKeyFile: "key" };
    const given = Object.entries(names).filter(([option]) => files.includes(option as keyof ConnectOptions));
    return connect("", Object.fromEntries(given.map(([option, name]) => [option, this.path(name)])));
  }
}

/** Calls; a server without services that was reached says so. */
async function reach(client: Client): Promise<void> {
  await assert.rejects(client.runs.listRuns({}, { timeoutMs: 20_000 }), UnimplementedError);
}

const one = proofFor("localhost");
const two = proofFor("localhost");
const renamed = proofFor("other.example");
const changes: [string, (keyof ConnectOptions)[], State, State][] = [
  ["the address of the join string", [], { shown: one }, { shown: one, moves: true }],
  ["the authority of the join string", [], { shown: one }, { shown: two }],
  ["the server name of the join string", [], { shown: one }, { shown: renamed, serverName: "other.example" }],
  ["the token of the join string", [], { shown: one, token: "t" }, { shown: one, token: "u" }],
  ["the CA file", ["caFile"], { shown: one }, { shown: two }],
  [
    "the client certificate",
    ["clientCertFile", "clientKeyFile"],
    { shown: one, clients: one },
    { shown: one, clients: two },
  ],
];
for (const [name, files, ...states] of changes) {
  test(`${name} is in force with the next call when its file changes`, async (context) => {
    const world = new World(context);
    let client: Client | undefined;
    for (const state of states) {
      await world.serve(state);
      world.write(state);
      client ??= world.dial(["joinFile", ...files]);
      await reach(client);
      assert.equal(world.tokens.at(-1), state.token && `Bearer ${state.token}`);
    }
    client?.close();
  });
}

test("a file that is not usable leaves in force what was before", async (context) => {
  const world = new World(context);
  await world.serve({ shown: one });
  world.write({ shown: one });
  using client = world.dial(["joinFile"]);
  for (const torn of ["af1.abc", "", undefined]) {
    if (torn === undefined) rmSync(world.path("join"));
    else writeFileSync(world.path("join"), torn);
    await reach(client);
  }
});

test("a server is awaited whose certificate is replaced before the files are", async (context) => {
  const world = new World(context);
  await world.serve({ shown: one });
  world.write({ shown: one });
  using client = world.dial(["joinFile"]);
  await reach(client);
  await world.serve({ shown: two });
  const reached = reach(client);
  assert.equal(await Promise.race([reached, delay(200, "waits")]), "waits");
  world.write({ shown: two });
  await reached;
});

/** The connection of a client as its files say it now: what they say may change while the client lives. */
import { readFileSync, statSync } from "node:fs";
import type { Transport } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import { endpointOf, type Endpoint, type TrustOptions } from "./address.js";
import { Connection } from "./connection.js";
import { InvalidArgumentError, RetryableError, UnavailableError, UntrustedServerError } from "./errors.js";
import { parseJoin } from "./join.js";
import { typedError } from "./status.js";

/** Largest message in either direction. */
export const MAX_MESSAGE_BYTES = 64 * 1024 * 1024;
/** A file written later than this ago is read again though it looks the same: its clock may not tell two writes apart. */
const SETTLED_MS = 1_000;

/** Files that say how to reach a server; read again when they change, for the calls from then on. */
export interface TrustFiles {
  /** Holds a join string. In place of a target, which is then empty. */
  joinFile?: string;
  /** In place of `ca`. */
  caFile?: string;
  /** In place of `clientCert` and `clientKey`. */
  clientCertFile?: string;
  clientKeyFile?: string;
}

interface Opened {
  readonly contents: string;
  readonly endpoint: Endpoint;
  readonly connection: Connection;
  readonly transport: Transport;
  calls: number;
}

/**
 * A transport whose calls begin over the connection that the files say now. Those that began over an earlier one end
 * there, and the last closes it. Files that are not usable are warned of and leave in force what was before.
 */
export class FollowingTransport implements Transport {
  readonly #read: () => Opened;
  readonly #files: string[];
  #now: Opened;
  #seen = "";
  #problem = "";
  #wasReached = false;
  readonly #retired = new Set<Opened>();

  constructor(target: string, options: TrustOptions & TrustFiles) {
    const { joinFile, caFile, clientCertFile, clientKeyFile, ...values } = options;
    const named = { joinFile, caFile, clientCertFile, clientKeyFile };
    this.#files = Object.values(named).filter((path) => path !== undefined);
    if (joinFile !== undefined && target)
      throw new InvalidArgumentError("both a target and joinFile are given; give one of them");
    this.#read = () => {
      const [join, ca, clientCert, clientKey] = Object.entries(named).map(contentOf);
      if (join !== undefined) parseJoin(join); // an address would not do
      const given = { ca, clientCert, clientKey };
      const trust = Object.fromEntries(Object.entries(given).filter(([, content]) => content !== undefined));
      return opened(endpointOf(join?.trim() ?? target, { ...values, ...trust }), JSON.stringify({ join, given }));
    };
    this.#now = this.#read();
  }

  get endpoint(): Endpoint {
    return this.#current().endpoint;
  }

  readonly unary: Transport["unary"] = async (...request) => {
    const used = this.#take();
    try {
      const answer = await used.transport.unary(...request);
      this.#wasReached = true;
      return answer;
    } catch (thrown) {
      throw this.#judged(thrown);
    } finally {
      this.#done(used);
    }
  };

  readonly stream: Transport["stream"] = async (...request) => {
    const used = this.#take();
    try {
      const answer = await used.transport.stream(...request);
      return { ...answer, message: this.#messages(answer.message, used) };
    } catch (thrown) {
      this.#done(used);
      throw this.#judged(thrown);
    }
  };

  close(): void {
    for (const each of [this.#now, ...this.#retired]) each.connection.abort();
  }

  async *#messages<Item>(messages: AsyncIterable<Item>, used: Opened): AsyncGenerator<Item> {
    try {
      for await (const message of messages) {
        this.#wasReached = true;
        yield message;
      }
    } catch (thrown) {
      throw this.#judged(thrown);
    } finally {
      this.#done(used);
    }
  }

  /** Where trust was there and can come back, a server that is not trusted is one that does not answer. */
  #judged(thrown: unknown): unknown {
    const error = typedError(thrown);
    if (error instanceof UntrustedServerError) {
      const mayComeBack = this.#wasReached && this.#files.length > 0;
      return mayComeBack ? new UnavailableError(error.message, { cause: error }) : thrown;
    }
    this.#wasReached ||= !(error instanceof RetryableError); // a refusal is an answer
    return thrown;
  }

  #take(): Opened {
    const used = this.#current();
    used.calls++;
    return used;
  }

  #done(used: Opened): void {
    used.calls--;
    if (used.calls === 0 && this.#retired.delete(used)) used.connection.abort();
  }

  #current(): Opened {
    const seen = look(this.#files);
    if (this.#files.length > 0 && (seen === undefined || seen !== this.#seen)) {
      this.#seen = seen ?? "";
      this.#readAgain();
    }
    return this.#now;
  }

  #readAgain(): void {
    try {
      const changed = this.#read();
      if (changed.contents !== this.#now.contents) {
        const before = this.#now;
        this.#now = changed;
        this.#retired.add(before);
        before.calls++;
        this.#done(before);
      }
      this.#problem = "";
    } catch (thrown) {
      const problem = typedError(thrown).message;
      if (problem !== this.#problem) process.emitWarning(`what was before stays in force: ${problem}`, "AstraFlow");
      this.#problem = problem;
    }
  }
}

function opened(endpoint: Endpoint, contents: string): Opened {
  const connection = new Connection(endpoint.baseUrl, endpoint.tls);
  const transport = createGrpcTransport({
    baseUrl: endpoint.baseUrl,
    sessionManager: connection,
    readMaxBytes: MAX_MESSAGE_BYTES,
    writeMaxBytes: MAX_MESSAGE_BYTES,
  });
  return { contents, endpoint, connection, transport, calls: 0 };
}

function contentOf([name, path]: [string, string | undefined]): string | undefined {
  if (path === undefined) return undefined;
  try {
    const content = readFileSync(path, "utf8");
    if (content.trim()) return content;
  } catch (thrown) {
    throw new InvalidArgumentError(`${name} ${path} cannot be read: ${(thrown as Error).message}`, { cause: thrown });
  }
  throw new InvalidArgumentError(`${name} ${path} is empty`);
}

/** Changes with every replacement of a file, also of a link's target; undefined while they may change unseen. */
function look(files: string[]): string | undefined {
  const found = files.map((path) => statSync(path, { throwIfNoEntry: false }));
  const isSettled = found.every((stat) => stat !== undefined && Date.now() - stat.ctimeMs > SETTLED_MS);
  return isSettled ? found.map((stat) => `${stat?.ino}/${stat?.size}/${stat?.ctimeMs}`).join() : undefined;
}

import assert from "node:assert/strict";
import { once } from "node:events";
import { readFileSync } from "node:fs";
import { createServer } from "node:http2";
import type { AddressInfo } from "node:net";
import { test } from "node:test";
import { create, fromBinary } from "@bufbuild/protobuf";
import {
  connect,
  correlated,
  ERRORS_BY_REASON,
  InvalidArgumentError,
  InvalidTrajectoryError,
  pages,
  RetryableError,
  trajectoryItem,
  VERSION,
} from "../src/index.js";
import { SamplingParamsSchema, TrajectorySchema } from "../src/rollout.js";
import { DEFAULT_RETRY, waitMs } from "../src/retry.js";
import { follow } from "../src/streams.js";

test("the package and its source name one release", () => {
  const manifest = JSON.parse(readFileSync("package.json", "utf8"));
  assert.equal(VERSION, manifest.version);
});

for (const address of [
  "",
  "7070",
  "host",
  "host:",
  "host:0",
  "host:65536",
  "http://host:1",
  "::1:7070",
  "a b:1",
]) {
  test(`address '${address}' is refused with its form`, () => {
    assert.throws(
      () => connect(address),
      (error) => error instanceof InvalidArgumentError && /HOST:PORT/.test(error.message),
    );
  });
}

test("addresses of every form are taken", () => {
  for (const address of ["127.0.0.1:7070", "[::1]:7070", "dataflow.svc-1.example:443"])
    connect(address).close();
});

test("waits double up to their bound and differ by chance; the server's hint wins", () => {
  for (let attempt = 1; attempt < 50; attempt++) {
    const ceiling = Math.min(2_000, 50 * 2 ** (attempt - 1));
    const wait = waitMs(DEFAULT_RETRY, attempt);
    assert.ok(wait >= ceiling / 2 && wait <= ceiling, `${wait} after ${attempt}`);
  }
  const hinted = waitMs(DEFAULT_RETRY, 9, 300);
  assert.ok(hinted >= 300 && hinted <= 450);
});

test("a correlation id must be printable", () => {
  for (const id of ["", "ü", "x".repeat(65), "a\nb"])
    assert.throws(() => correlated(id, () => 0), InvalidArgumentError);
  assert.equal(
    correlated("step-7", () => 1),
    1,
  );
});

test("pages end with the last token", async () => {
  const asked: unknown[] = [];
  const list = async (request: object & { pageToken?: string }) => {
    asked.push(request.pageToken);
    return { nextPageToken: asked.length < 3 ? `${asked.length}` : "" };
  };
  for await (const page of pages(list, { runId: "r" })) assert.ok(page);
  assert.deepEqual(asked, [undefined, "1", "2"]);
});

const tokens = {
  trajectoryId: "t",
  policyId: "solver",
  reward: 1,
  finishReason: "stop",
  tokenIds: [5, 6, 7, 8],
  lossMask: [0, 1, 0, 1],
  logprobs: [0, -0.5, 0, -1],
  sampling: create(SamplingParamsSchema, { temperature: 1 }),
};

test("a header follows from the tokens", () => {
  const versionSpans = [
    { start: 1, end: 2, version: 3n },
    { start: 2, end: 4, version: 4n },
  ];
  const { header, body } = trajectoryItem({ ...tokens, versionSpans });
  assert.deepEqual([header?.numTokens, header?.numTrainableTokens], [4, 2]);
  assert.deepEqual([header?.minVersion, header?.maxVersion], [3n, 4n]);
  assert.equal(fromBinary(TrajectorySchema, body).sampling?.temperature, 1);
});

test("a trained token without a version, and nothing to train on, are refused", () => {
  const versionSpans = [{ start: 1, end: 2, version: 3n }];
  assert.throws(
    () => trajectoryItem({ ...tokens, versionSpans }),
    /token 3 is trained on and in no version span/,
  );
  assert.throws(
    () => trajectoryItem({ ...tokens, lossMask: [0, 0, 0, 0], versionSpans }),
    InvalidTrajectoryError,
  );
});

test("a stream that was reached is opened anew; one that was not throws", async () => {
  let opened = 0;
  const away = new (ERRORS_BY_REASON.get("UNAVAILABLE")!)("away");
  async function* open(): AsyncGenerator<number> {
    yield ++opened;
    throw away;
  }
  const seen: number[] = [];
  for await (const item of follow(open)) if (seen.push(item) === 2) break;
  assert.deepEqual(seen, [1, 2]);
  const never = async function* (): AsyncGenerator<number> {
    throw away;
  };
  await assert.rejects(follow(never).next(), RetryableError);
});

test("a call that is aborted rejects with the signal's reason, and one to nobody is unavailable in time", async () => {
  const client = connect("127.0.0.1:1", { retry: { totalMs: 200 } });
  await assert.rejects(client.serverInfo(), { reason: "UNAVAILABLE" });
  await assert.rejects(client.serverInfo({ signal: AbortSignal.abort(new Error("enough")) }), /enough/);
  client.close();
});

test("a value that the contract cannot carry is a wrong request", async () => {
  const server = createServer();
  server.on("session", (session) => session.on("error", () => undefined));
  server.on("stream", (stream) => stream.on("error", () => undefined));
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  const client = connect(`127.0.0.1:${(server.address() as AddressInfo).port}`, { retry: { totalMs: 0 } });
  await assert.rejects(client.tasks.leaseTasks({ runId: "r", maxTasks: -1 }), InvalidArgumentError);
  client.close();
  server.close();
});

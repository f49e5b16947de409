import assert from "node:assert/strict";
import { once } from "node:events";
import { test } from "node:test";
import { create } from "@bufbuild/protobuf";
import { joinRun, NotFoundError, UnavailableError, type Client } from "../src/index.js";
import {
  JoinRunResponseSchema,
  WorkResponseSchema,
  type LeaseFailure,
  type WorkRequest,
} from "../src/dataflow.js";

/** A server that gives one lease on each stream, and keeps what the node says. */
class FakeServer {
  readonly heard: WorkRequest["kind"][] = [];
  readonly failures: LeaseFailure[] = [];
  readonly endings: Error[] = [];
  numJoins = 0;

  client(): Client {
    const joinRun = async () => {
      this.numJoins++;
      return create(JoinRunResponseSchema, { run: { runId: "r" } });
    };
    const failTask = async ({ failure }: { failure: LeaseFailure }) => this.failures.push(failure);
    const work = (requests: AsyncIterable<WorkRequest>, { signal }: { signal: AbortSignal }) =>
      this.#work(requests, signal);
    return { runs: { joinRun }, tasks: { failTask, work } } as unknown as Client;
  }

  async *#work(requests: AsyncIterable<WorkRequest>, signal: AbortSignal) {
    void this.#listen(requests);
    const lease = { leaseId: "t1#1", runId: "r", task: { taskId: "t1" }, members: [0], attempt: 1 };
    yield create(WorkResponseSchema, { kind: { case: "lease", value: lease } });
    const ending = this.endings.shift();
    if (ending !== undefined) throw ending;
    if (!signal.aborted) await once(signal, "abort");
    throw signal.reason;
  }

  async #listen(requests: AsyncIterable<WorkRequest>): Promise<void> {
    for await (const { kind } of requests) this.heard.push(kind);
  }
}

const NODE = { nodeId: "n1", maxConcurrentTasks: 2 };

test("a handler that throws gives its lease back with the reason", async () => {
  const server = new FakeServer();
  const session = await joinRun(server.client(), NODE);
  const stop = new AbortController();
  const run = async () => {
    setImmediate(() => stop.abort());
    throw new TypeError("no such tool");
  };
  assert.equal(await session.serve({ run }, { signal: stop.signal }), "stopped");
  const [failure] = server.failures;
  assert.equal(failure?.reason, "workflow_error");
  assert.match(failure?.detail ?? "", /no such tool/);
});

test("a lost stream is opened anew with the leases that are held, which run once", async () => {
  const server = new FakeServer();
  server.endings.push(new UnavailableError("away"));
  const session = await joinRun(server.client(), NODE);
  const stop = new AbortController();
  let started = 0;
  const run = async (_: unknown, signal: AbortSignal) => {
    started++;
    await once(signal, "abort");
  };
  const served = session.serve({ run }, { signal: stop.signal, drainMs: 10 });
  while (server.heard.filter(({ case: kind }) => kind === "receipt").length < 2) {
    await new Promise((resolve) => setTimeout(resolve, 5));
  }
  stop.abort();
  await served;
  const hellos = server.heard.flatMap(({ case: kind, value }) =>
    kind === "hello" ? [value.held?.leaseIds] : [],
  );
  assert.deepEqual([hellos, started, server.numJoins], [[[], ["t1#1"]], 1, 2]);
  assert.deepEqual(
    server.failures.map(({ reason }) => reason),
    ["drain"],
  );
});

test("a refusal and an error of the caller's own functions end the session", async () => {
  const server = new FakeServer();
  server.endings.push(new NotFoundError("the run is gone"));
  const run = (_: unknown, signal: AbortSignal) => once(signal, "abort").then(() => undefined);
  await assert.rejects((await joinRun(server.client(), NODE)).serve({ run }), NotFoundError);
  const state = () => {
    throw new RangeError("no such model");
  };
  await assert.rejects((await joinRun(server.client(), NODE)).serve({ run, state }), RangeError);
});

import assert from "node:assert/strict";
import { test } from "node:test";
import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { PushStream, UnavailableError, NotFoundError, type Client } from "../src/index.js";
import {
  Durability,
  Outcome,
  PushResponseSchema,
  PushResultSchema,
  WatermarkSchema,
  type PushRequest,
} from "../src/dataflow.js";
import { EpisodeSchema } from "../src/rollout.js";

const episode = (episodeId: string) => create(EpisodeSchema, { episodeId });

/** A server that answers each push, and ends its stream as `endings` says after this many answers. */
class FakeServer {
  readonly pushed: string[] = [];
  readonly packs: number[] = [];
  /** Episodes that must come again once. */
  readonly retried = new Set<string>();
  readonly endings: { after: number; error: Error }[] = [];
  /** Episodes that are acknowledged together. */
  together = 1;
  /** Answers that the next response leaves out. */
  leftOut = 0;
  /** Pushes that the next response acknowledges and nobody sent. */
  ahead = 0n;
  numStreams = 0;
  incarnation = "one";

  client(): Client {
    const push = (requests: AsyncIterable<PushRequest>, { signal }: { signal: AbortSignal }) =>
      this.#push(requests, signal);
    return { trajectories: { push } } as unknown as Client;
  }

  async *#push(requests: AsyncIterable<PushRequest>, signal: AbortSignal) {
    this.numStreams++;
    const ending = this.endings.shift();
    let answered = 0;
    const aborted = new Promise<never>((_, reject) =>
      signal.addEventListener("abort", () => reject(signal.reason)),
    );
    const incoming = requests[Symbol.asyncIterator]();
    let results: MessageInitShape<typeof PushResultSchema>[] = [];
    for (;;) {
      const { done, value } = await Promise.race([incoming.next(), aborted]);
      if (done) return;
      const { sequence, episodes } = value;
      this.packs.push(episodes.length);
      for (const { episodeId } of episodes) {
        this.pushed.push(episodeId);
        const isRefused = this.retried.delete(episodeId);
        results.push({
          outcome: isRefused ? Outcome.RETRY : Outcome.ACCEPTED,
          reason: isRefused ? "UNKNOWN_VERSION" : "",
          durability: Durability.MEMORY,
          position: BigInt(this.pushed.length),
        });
      }
      if (results.length < this.together) continue;
      results.splice(0, this.leftOut);
      this.leftOut = 0;
      if (ending?.after === answered) throw ending.error;
      const watermark = { durablePosition: 0n, dataIncarnation: this.incarnation };
      answered += results.length;
      const upTo = sequence + this.ahead;
      this.ahead = 0n;
      yield create(PushResponseSchema, { sequence: upTo, results, watermark });
      results = [];
    }
  }
}

test("what waits is pushed together, as much as fits the window", async () => {
  const server = new FakeServer();
  const stream = new PushStream(server.client(), { windowEpisodes: 3 });
  const ids = ["a", "b", "c", "d", "e"];
  await Promise.all(ids.map((id) => stream.push(episode(id))));
  assert.deepEqual(server.pushed, ids);
  assert.equal(Math.max(...server.packs), 3);
  assert.ok(await stream.close());
});

test("one response may acknowledge several pushes, and one with an answer too few none", async () => {
  const server = new FakeServer();
  server.together = 2;
  server.leftOut = 1;
  const stream = new PushStream(server.client());
  const first = stream.push(episode("a"));
  while (server.pushed.length < 1) await new Promise(setImmediate);
  await Promise.all([first, stream.push(episode("b"))]);
  assert.deepEqual(server.pushed, ["a", "b", "a", "b"]);
  assert.deepEqual(server.packs.slice(0, 2), [1, 1]);
  assert.ok(await stream.close());
});

test("a response to a push that was not sent acknowledges none", async () => {
  const server = new FakeServer();
  server.ahead = 1n;
  const stream = new PushStream(server.client());
  await stream.push(episode("a"));
  assert.deepEqual(server.pushed, ["a", "a"]);
  assert.ok(await stream.close());
});

test("an episode that could not be taken in yet comes again, and those after it", async () => {
  const server = new FakeServer();
  server.retried.add("b");
  const stream = new PushStream(server.client());
  const results = await Promise.all(["a", "b", "c"].map((id) => stream.push(episode(id))));
  assert.ok(results.every(({ outcome }) => outcome === Outcome.ACCEPTED));
  assert.deepEqual(
    server.pushed.filter((id) => id === "b"),
    ["b", "b"],
  );
  assert.equal(server.numStreams, 2);
  assert.ok(await stream.close());
});

test("what a lost stream did not answer is pushed again, in order", async () => {
  const server = new FakeServer();
  server.endings.push({ after: 1, error: new UnavailableError("away") });
  const stream = new PushStream(server.client(), { windowEpisodes: 1 });
  const results = await Promise.all(["a", "b", "c"].map((id) => stream.push(episode(id))));
  assert.deepEqual(
    results.map(({ outcome }) => outcome),
    [Outcome.ACCEPTED, Outcome.ACCEPTED, Outcome.ACCEPTED],
  );
  assert.deepEqual([server.pushed, server.numStreams], [["a", "b", "b", "c"], 2]);
  assert.ok(await stream.close());
});

test("another data set gets again what was not durable in the one before", async () => {
  const server = new FakeServer();
  const stream = new PushStream(server.client());
  await stream.push(episode("a"));
  await stream.push(episode("b"));
  stream.durable(create(WatermarkSchema, { durablePosition: 1n, dataIncarnation: "one" }));
  server.incarnation = "two";
  stream.dataSet("two");
  assert.ok(await stream.close());
  assert.deepEqual(server.pushed, ["a", "b", "b"]);
});

test("a refusal rejects who waits; the next push opens another stream", async () => {
  const server = new FakeServer();
  server.endings.push({ after: 0, error: new NotFoundError("no such run") });
  const stream = new PushStream(server.client());
  await assert.rejects(stream.push(episode("a")), NotFoundError);
  assert.equal((await stream.push(episode("b"))).outcome, Outcome.ACCEPTED);
  await stream.close();
});

test("a full stream makes push wait until there is room", async () => {
  const server = new FakeServer();
  const stream = new PushStream(server.client(), { maxEpisodes: 1, retainMs: 50 });
  const began = performance.now();
  await stream.push(episode("a"));
  stream.durable(create(WatermarkSchema, { durablePosition: 0n, dataIncarnation: "one" }));
  const second = stream.push(episode("b"));
  assert.equal(stream.numWaiting, 0);
  stream.durable(create(WatermarkSchema, { durablePosition: 1n, dataIncarnation: "one" }));
  assert.equal((await second).outcome, Outcome.ACCEPTED);
  assert.ok(performance.now() - began < 10_000);
  await stream.close();
});

test("closing gives up what the server does not answer", async () => {
  const server = new FakeServer();
  for (let stream = 0; stream < 100; stream++)
    server.endings.push({ after: 0, error: new UnavailableError("away") });
  const stream = new PushStream(server.client());
  const pushed = assert.rejects(stream.push(episode("a")), /closed before the server answered/);
  assert.equal(await stream.close({ timeoutMs: 300 }), false);
  await pushed;
  await assert.rejects(stream.push(episode("b")), /is closed/);
});

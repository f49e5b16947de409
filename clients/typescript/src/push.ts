/**
 * Pushing finished episodes over one stream until the server has answered for each.
 *
 * An episode that `push` accepted is sent again on every new stream until it is acknowledged (the server recognises
 * repetitions); at most the contract's window is unacknowledged; memory is bounded: when it is full, `push` waits.
 * What is acknowledged in memory only is kept until the server's watermark passes it, and pushed again when the server
 * comes back with another data set.
 */
import { toBinary, type MessageInitShape } from "@bufbuild/protobuf";
import type { Client } from "./client.js";
import { InternalError, InvalidArgumentError, UnavailableError } from "./errors.js";
import { Durability, type Watermark } from "./gen/astraflow/dataflow/v1/durability_pb.js";
import {
  Outcome,
  type PushRequestSchema,
  type PushResponse,
  type PushResult,
} from "./gen/astraflow/dataflow/v1/trajectory_service_pb.js";
import { EpisodeSchema, type Episode } from "./gen/astraflow/rollout/v1/trajectory_pb.js";
import { mayComeBack, Outbox, pause } from "./streams.js";

/** Episodes of one push, by the contract. */
const MAX_PACK = 64;

/** Bounds of a push stream; the window's are the contract's. */
export interface PushLimits {
  /** Episodes kept, acknowledged ones included that the server's disk may not have yet. */
  maxEpisodes: number;
  maxBytes: number;
  windowEpisodes: number;
  windowBytes: number;
  /** How long an acknowledged episode is kept when the server cannot tell what is durable. */
  retainMs: number;
}

const DEFAULT_LIMITS: PushLimits = {
  maxEpisodes: 4_096,
  maxBytes: 2 ** 28,
  windowEpisodes: 128,
  windowBytes: 2 ** 24,
  retainMs: 3_000,
};

interface Kept {
  readonly episode: Episode;
  readonly bytes: number;
  resolve(result: PushResult): void;
  reject(error: unknown): void;
  /** Of the push of the stream of now that it went with. */
  sequence: bigint;
  position: bigint;
  ackedMs: number;
}

/** One push stream of one run. `close` it when the last episode is pushed. */
export class PushStream {
  readonly #client: Client;
  readonly #limits: PushLimits;
  readonly #stopped = new AbortController();
  #unsent: Kept[] = [];
  #inFlight: Kept[] = [];
  #acked: Kept[] = [];
  #dataIncarnation = "";
  #durablePosition: bigint | undefined;
  #send: () => void = () => undefined;
  #isSendDue = false;
  #isRunning = false;
  #running: Promise<void> = Promise.resolve();
  #listeners: (() => void)[] = [];

  constructor(client: Client, limits: Partial<PushLimits> = {}) {
    this.#client = client;
    this.#limits = { ...DEFAULT_LIMITS, ...limits };
  }

  /** Episodes without an acknowledgement. */
  get numWaiting(): number {
    return this.#unsent.length + this.#inFlight.length;
  }

  /**
   * Returns what became of the episode: an outcome, never an error, for one that the server does not want.
   *
   * Waits while the stream holds all it may, and until the server answers. Rejects when the server refuses the stream.
   */
  async push(episode: Episode): Promise<PushResult> {
    const bytes = toBinary(EpisodeSchema, episode).length;
    while (!this.#hasRoom(bytes)) await this.#change();
    if (this.#stopped.signal.aborted)
      throw new InvalidArgumentError("the push stream is closed; open another one");
    return new Promise((resolve, reject) => {
      this.#unsent.push({ episode, bytes, resolve, reject, sequence: 0n, position: 0n, ackedMs: 0 });
      this.#start();
    });
  }

  /** The server's disk has every commit up to this one. A working session that knows the stream calls it. */
  durable({ dataIncarnation, durablePosition }: Watermark): void {
    this.dataSet(dataIncarnation);
    this.#durablePosition = durablePosition;
    this.#forgetSafe();
  }

  /** The server works on this data set: with another one than before, what was not durable is pushed again. */
  dataSet(incarnation: string): void {
    const before = this.#dataIncarnation;
    this.#dataIncarnation = incarnation;
    if (before === "" || before === incarnation) return;
    this.#durablePosition = undefined; // positions of the lost data set mean nothing in the new one
    this.#unsent.unshift(...this.#acked.splice(0));
    if (this.#unsent.length > 0) this.#start();
  }

  /** Waits until everything is acknowledged, at most `timeoutMs`, and ends the stream. False when something is left. */
  async close({ timeoutMs = 10_000 }: { timeoutMs?: number } = {}): Promise<boolean> {
    const timer = setTimeout(() => this.#stopped.abort(), timeoutMs);
    while (this.numWaiting > 0 && !this.#stopped.signal.aborted) await this.#change();
    clearTimeout(timer);
    this.#stopped.abort();
    await this.#running;
    const left = [...this.#inFlight.splice(0), ...this.#unsent.splice(0)];
    const error = new InvalidArgumentError(
      "the push stream was closed before the server answered; push it again",
    );
    for (const kept of left) kept.reject(error);
    return left.length === 0;
  }

  #start(): void {
    if (!this.#isRunning) {
      this.#isRunning = true;
      this.#running = this.#run();
    }
    this.#sendSoon();
  }

  /** After what is going on now, so that what is pushed meanwhile goes together. */
  #sendSoon(): void {
    if (this.#isSendDue) return;
    this.#isSendDue = true;
    setImmediate(() => {
      this.#isSendDue = false;
      this.#send();
    });
  }

  async #run(): Promise<void> {
    const { signal } = this.#stopped;
    for (let failures = 0; !signal.aborted;) {
      let hintMs: number | undefined;
      try {
        await this.#converse(signal, () => (failures = 0));
      } catch (error) {
        if (signal.aborted) return;
        if (!mayComeBack(error)) return this.#refuse(error);
        failures++;
        hintMs = error.retryAfterMs;
      }
      await pause(failures, hintMs, signal);
    }
  }

  /** One stream: write what fits the window, read acknowledgements. */
  async #converse(signal: AbortSignal, worked: () => void): Promise<void> {
    const requests = new Outbox<MessageInitShape<typeof PushRequestSchema>>();
    let sequence = 1n;
    this.#send = () => {
      for (let next = this.#nextToSend(sequence); next !== undefined; next = this.#nextToSend(sequence)) {
        requests.put({ sequence: sequence++, episodes: next.map(({ episode }) => episode) });
      }
    };
    this.#sendSoon();
    try {
      for await (const response of this.#client.trajectories.push(requests, { signal })) {
        this.#acknowledge(response);
        worked();
        this.#send();
      }
    } finally {
      requests.close();
      this.#send = () => undefined;
      // On the next stream in the old order: the server recognises what it has.
      this.#unsent.unshift(...this.#inFlight.splice(0));
    }
  }

  /** What waits and fits the window: it goes together, and costs the server one commit. */
  #nextToSend(sequence: bigint): Kept[] | undefined {
    const { windowEpisodes, windowBytes } = this.#limits;
    const next: Kept[] = [];
    let bytes = bytesOf(this.#inFlight);
    for (let kept = this.#unsent[0]; kept !== undefined && next.length < MAX_PACK; kept = this.#unsent[0]) {
      const isFull = this.#inFlight.length >= windowEpisodes || bytes + kept.bytes > windowBytes;
      if (this.#inFlight.length > 0 && isFull) break;
      this.#unsent.shift();
      kept.sequence = sequence;
      this.#inFlight.push(kept);
      next.push(kept);
      bytes += kept.bytes;
    }
    return next.length > 0 ? next : undefined;
  }

  #acknowledge({ sequence, results, watermark }: PushResponse): void {
    const answered = this.#inFlight.filter((kept) => kept.sequence <= sequence);
    if (answered.at(-1)?.sequence !== sequence || results.length !== answered.length)
      throw new InternalError(
        `the server acknowledged ${results.length} episodes up to push ${sequence}, expected ${answered.length}`,
      );
    try {
      for (const result of results) {
        if (result.outcome === Outcome.RETRY)
          throw new UnavailableError(`${result.reason}: ${result.detail}`);
        this.#answered(this.#inFlight.shift()!, result);
      }
      if (watermark !== undefined) this.durable(watermark);
    } finally {
      this.#changed();
    }
  }

  #answered(kept: Kept, result: PushResult): void {
    kept.resolve(result);
    if (result.outcome !== Outcome.REFUSED && result.durability < Durability.FSYNCED) {
      kept.position = result.position;
      kept.ackedMs = performance.now();
      this.#acked.push(kept);
    }
  }

  /** The server refuses the stream: everybody who waits gets the reason, the next push opens another one. */
  #refuse(error: unknown): void {
    this.#isRunning = false;
    for (const kept of [...this.#inFlight.splice(0), ...this.#unsent.splice(0)]) kept.reject(error);
    this.#changed();
  }

  #forgetSafe(): void {
    const before = performance.now() - this.#limits.retainMs;
    const isSafe = ({ position, ackedMs }: Kept) =>
      this.#durablePosition !== undefined && position > 0n
        ? position <= this.#durablePosition
        : ackedMs < before;
    while (this.#acked[0] !== undefined && isSafe(this.#acked[0])) this.#acked.shift();
  }

  #hasRoom(bytes: number): boolean {
    if (this.#stopped.signal.aborted) return true;
    this.#forgetSafe();
    const kept = [...this.#unsent, ...this.#inFlight, ...this.#acked];
    const { maxEpisodes, maxBytes } = this.#limits;
    return kept.length === 0 || (kept.length < maxEpisodes && bytesOf(kept) + bytes <= maxBytes);
  }

  /** The next acknowledgement, refusal or end; a quarter of a second at most, for what becomes safe by time alone. */
  #change(): Promise<void> {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, 250);
      this.#listeners.push(() => (clearTimeout(timer), resolve()));
    });
  }

  #changed(): void {
    for (const listener of this.#listeners.splice(0)) listener();
  }
}

function bytesOf(kept: readonly Kept[]): number {
  return kept.reduce((sum, { bytes }) => sum + bytes, 0);
}

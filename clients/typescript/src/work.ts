/**
 * A node's working session: join a run, take leases, keep them while they are worked on, leave in order.
 *
 * A broken stream ends nothing that is leased: the session joins again under the same incarnation, says what it holds,
 * and the server's answer decides. Each lease ends as finished, as one reported failure, or as cancelled by the server.
 */
import { durationMs } from "@bufbuild/protobuf/wkt";
import type { MessageInitShape } from "@bufbuild/protobuf";
import type { Client } from "./client.js";
import { AstraflowError, InternalError } from "./errors.js";
import type { JoinRunResponse } from "./gen/astraflow/dataflow/v1/run_service_pb.js";
import type {
  CreditsSchema,
  WorkRequestSchema,
  WorkResponse,
} from "./gen/astraflow/dataflow/v1/task_service_pb.js";
import type { Run } from "./gen/astraflow/dataflow/v1/run_pb.js";
import type { Version } from "./gen/astraflow/dataflow/v1/version_pb.js";
import type { Lease } from "./gen/astraflow/rollout/v1/task_pb.js";
import type { PushStream } from "./push.js";
import { DEFAULT_RETRY } from "./retry.js";
import { mayComeBack, Outbox, pause } from "./streams.js";

const HEARTBEAT_MS = 2_000;
const MIN_LEASE_MS = 300;
const MAX_DETAIL = 2_048;
const REPORT_RETRY = { ...DEFAULT_RETRY, totalMs: 10_000 };

/** Who the node is and what it can do. */
export interface NodeOptions {
  /** Stable name of the node: 1–64 of `A-Za-z0-9._-`. */
  nodeId: string;
  /** Run to join; left out, the only run. */
  runId?: string;
  /** Tasks it works on at once. */
  maxConcurrentTasks: number;
  region?: string;
  pool?: string;
  engines?: string[];
}

/** What a node works with. */
export interface Work {
  /**
   * Runs the missing members of a lease and pushes their episodes. The signal is aborted when the server takes the
   * lease away. Throw `TaskFailed` to give it back; any other error is reported as `workflow_error`.
   */
  run(lease: Lease, signal: AbortSignal): Promise<void>;
  /** What the node serves and waits for now; asked before each report to the server. */
  state?(): Omit<MessageInitShape<typeof CreditsSchema>, "tasks" | "leasesReceived" | "$typeName">;
  /** A version was announced: the newest of each policy when the session starts, then each as it comes. */
  onVersion?(version: Version): void;
  /** Where `run` pushes: it learns from the session what is durable, and pushes again what the server lost. */
  pushes?: PushStream;
  /** The session was lost and is opened anew. */
  onLost?(error: AstraflowError): void;
}

/** Gives a lease back. `reason` is a slug of the contract's `LeaseFailure`. */
export class TaskFailed extends Error {
  constructor(
    readonly reason: string,
    readonly detail: string,
    readonly retryable = true,
  ) {
    super(`${reason}: ${detail}`);
    this.name = "TaskFailed";
  }
}

interface Held {
  readonly lease: Lease;
  readonly cancelled: AbortController;
  done: Promise<void>;
}

/**
 * Joins the run and returns the session; nothing is leased before `serve`. A name that another process has is refused;
 * to take your own up after a restart, keep `credential` and connect with it as `session`.
 */
export async function joinRun(client: Client, options: NodeOptions): Promise<WorkSession> {
  return new WorkSession(client, options, await client.runs.joinRun(options));
}

/** A joined node. */
export class WorkSession {
  /** The run with its recipe. */
  readonly run: Run;
  readonly #client: Client;
  readonly #me: NodeOptions;
  readonly #held = new Map<string, Held>();
  readonly #reports = new Set<Promise<void>>();
  #joined: JoinRunResponse;
  #drainReason: string | undefined;
  #received = 0n;
  #requests: Outbox<MessageInitShape<typeof WorkRequestSchema>> | undefined;
  #state: NonNullable<Work["state"]> = () => ({});
  #fail: (error: unknown) => void = () => undefined;

  constructor(client: Client, me: NodeOptions, joined: JoinRunResponse) {
    if (joined.run === undefined) throw new InternalError("the server answered JoinRun without a run");
    this.#client = client;
    this.#me = me;
    this.#joined = joined;
    this.run = joined.run;
  }

  /** Credential of the session, a secret by which a later process is the same node. */
  get credential(): string {
    return this.#joined.session;
  }

  /** Newest announced version of each policy that has one, as of the last join. */
  get versions(): readonly Version[] {
    return this.#joined.versions;
  }

  /** Leases being worked on. */
  get numHeld(): number {
    return this.#held.size;
  }

  /** Says soon what `Work.state` returns now, for instance after another version is served. */
  stateChanged(): void {
    this.#sendCredits();
  }

  /**
   * Works until the server drains the node or `signal` is aborted, then finishes what is held for at most `drainMs`,
   * gives the rest back, and returns why it ended. Throws when the server refuses the node, and what `work.state` or
   * `work.onVersion` throws.
   */
  async serve(
    work: Work,
    { signal, drainMs = 30_000 }: { signal?: AbortSignal; drainMs?: number } = {},
  ): Promise<string> {
    this.#state = work.state?.bind(work) ?? (() => ({}));
    work.pushes?.dataSet(this.#joined.dataIncarnation);
    const ended = new AbortController();
    const failures: unknown[] = [];
    this.#fail = (error) => {
      failures.push(error);
      ended.abort();
    };
    const drain = (reason: string) => {
      if (this.#drainReason !== undefined) return;
      this.#drainReason = reason;
      this.#sendCredits();
      void this.#finishHeld(drainMs).then(() => ended.abort());
    };
    const onAbort = () => drain("stopped");
    signal?.addEventListener("abort", onAbort, { once: true });
    if (signal?.aborted) onAbort();
    try {
      await this.#reconnect(work, drain, ended.signal);
    } finally {
      signal?.removeEventListener("abort", onAbort);
      for (const held of this.#held.values()) held.cancelled.abort();
    }
    await Promise.all(this.#reports);
    if (failures.length > 0) throw failures[0];
    return this.#drainReason ?? "";
  }

  async #reconnect(work: Work, drain: (reason: string) => void, signal: AbortSignal): Promise<void> {
    for (let failures = 0, hasJoined = true; !signal.aborted; hasJoined = false) {
      let hintMs: number | undefined;
      try {
        if (!hasJoined) await this.#rejoin(work, signal);
        failures = 0;
        await this.#converse(work, drain, signal);
      } catch (error) {
        if (signal.aborted) return;
        if (!mayComeBack(error)) throw error;
        failures++;
        hintMs = error.retryAfterMs;
        work.onLost?.(error);
      }
      await pause(failures, hintMs, signal);
    }
  }

  async #rejoin(work: Work, signal: AbortSignal): Promise<void> {
    const me = { ...this.#me, incarnation: this.#joined.incarnation };
    this.#joined = await this.#client.runs.joinRun(me, { signal });
    work.pushes?.dataSet(this.#joined.dataIncarnation);
  }

  async #converse(work: Work, drain: (reason: string) => void, signal: AbortSignal): Promise<void> {
    const { nodeId } = this.#me;
    const { incarnation } = this.#joined;
    const requests = new Outbox<MessageInitShape<typeof WorkRequestSchema>>();
    const held = { leaseIds: [...this.#held.keys()] };
    this.#received = 0n;
    this.#requests = requests;
    this.#send({ case: "hello", value: { runId: this.run.runId, nodeId, incarnation, held } });
    this.#sendCredits();
    const ttlMs = Math.max(
      MIN_LEASE_MS,
      this.#joined.leaseTtlDuration ? durationMs(this.#joined.leaseTtlDuration) : 0,
    );
    const renewals = setInterval(() => {
      if (this.#held.size > 0) this.#send({ case: "renewal", value: { leaseIds: [...this.#held.keys()] } });
    }, ttlMs / 3);
    const heartbeats = setInterval(() => this.#sendCredits(), HEARTBEAT_MS);
    try {
      for await (const response of this.#client.tasks.work(requests, { signal })) {
        this.#receive(response.kind, work, drain);
      }
    } finally {
      clearInterval(renewals);
      clearInterval(heartbeats);
      requests.close();
      this.#requests = undefined;
    }
  }

  #receive(kind: WorkResponse["kind"], work: Work, drain: (reason: string) => void): void {
    if (kind.case === "lease") this.#accept(kind.value, work);
    else if (kind.case === "cancel") this.#held.get(kind.value.leaseId)?.cancelled.abort(kind.value.reason);
    else if (kind.case === "version") work.onVersion?.(kind.value);
    else if (kind.case === "watermark") work.pushes?.durable(kind.value);
    else if (kind.case === "drain") drain(kind.value.reason);
  }

  #accept(lease: Lease, work: Work): void {
    this.#received++;
    // What is not confirmed when the stream breaks is given back by the server.
    this.#send({ case: "receipt", value: { leaseIds: [lease.leaseId] } });
    if (this.#held.has(lease.leaseId)) return;
    if (this.#drainReason !== undefined) {
      this.#report(lease, new TaskFailed("drain", "leased to a node that drains"));
      return;
    }
    const held: Held = { lease, cancelled: new AbortController(), done: Promise.resolve() };
    this.#held.set(lease.leaseId, held);
    held.done = this.#work(held, work);
  }

  async #work(held: Held, work: Work): Promise<void> {
    let failure: TaskFailed | undefined;
    try {
      await work.run(held.lease, held.cancelled.signal);
    } catch (error) {
      failure = error instanceof TaskFailed ? error : new TaskFailed("workflow_error", String(error));
    }
    this.#held.delete(held.lease.leaseId);
    if (failure !== undefined && !held.cancelled.signal.aborted) this.#report(held.lease, failure);
    this.#sendCredits();
  }

  /** Finishes what is held within `drainMs`, and gives the rest back. */
  async #finishHeld(drainMs: number): Promise<void> {
    const deadline = new Promise<void>((resolve) => setTimeout(resolve, drainMs).unref());
    await Promise.race([Promise.all([...this.#held.values()].map(({ done }) => done)), deadline]);
    for (const { lease, cancelled } of this.#held.values()) {
      cancelled.abort("drain");
      this.#report(lease, new TaskFailed("drain", `not finished within the drain's ${drainMs} ms`));
    }
  }

  #report(lease: Lease, { reason, detail, retryable }: TaskFailed): void {
    const failure = { leaseId: lease.leaseId, reason, detail: detail.slice(0, MAX_DETAIL), retryable };
    const request = { runId: lease.runId, nodeId: this.#me.nodeId, failure };
    const call = this.#client.tasks.failTask(request, { retry: REPORT_RETRY });
    // A lease whose report fails runs out by itself: another node only gets the task later.
    const report: Promise<void> = call
      .then(
        () => undefined,
        () => undefined,
      )
      .finally(() => this.#reports.delete(report));
    this.#reports.add(report);
  }

  #sendCredits(): void {
    let state: ReturnType<NonNullable<Work["state"]>> = { waitingFor: "drain" };
    try {
      if (this.#drainReason === undefined) state = this.#state();
    } catch (error) {
      return this.#fail(error); // it is called out of timers, where nobody else would see it
    }
    const free = state.waitingFor ? 0 : this.#me.maxConcurrentTasks - this.#held.size;
    this.#send({
      case: "credits",
      value: { ...state, tasks: Math.max(0, free), leasesReceived: this.#received },
    });
  }

  #send(kind: NonNullable<MessageInitShape<typeof WorkRequestSchema>["kind"]>): void {
    this.#requests?.put({ kind });
  }
}

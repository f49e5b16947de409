/**
 * Runs the conformance suite's operations with this client: one JSON object per line in, one per line out.
 *
 * The operations are in docs/clients.md; what is right is decided by whoever sends them.
 */
import { createInterface } from "node:readline";
import {
  fromBinary,
  fromJson,
  toBinary,
  toJson,
  type DescMethod,
  type DescService,
  type JsonObject,
} from "@bufbuild/protobuf";
import * as astraflow from "../src/index.js";
import * as dataflow from "../src/dataflow.js";
import { EpisodeSchema, LeaseSchema, TrajectorySchema, type Lease } from "../src/rollout.js";

// Parsed JSON whose shape the table of operations fixes.
type Operation = Record<string, any>;

interface OpenSession {
  session: astraflow.WorkSession;
  stop: AbortController;
  served: Promise<string>;
  events: Events;
  leases: Map<string, { resolve(): void; reject(error: Error): void }>;
}

/** What a session saw, handed out one by one. */
class Events {
  readonly #seen: JsonObject[] = [];
  readonly #waiting: ((event: JsonObject) => void)[] = [];

  add(event: JsonObject): void {
    const waiter = this.#waiting.shift();
    if (waiter) waiter(event);
    else this.#seen.push(event);
  }

  next(): Promise<JsonObject> {
    const event = this.#seen.shift();
    return event ? Promise.resolve(event) : new Promise((resolve) => this.#waiting.push(resolve));
  }
}

const SERVICES: Record<string, [keyof astraflow.Client, DescService]> = {
  AdminService: ["admin", dataflow.AdminService],
  BatchService: ["batches", dataflow.BatchService],
  EvaluationService: ["evaluations", dataflow.EvaluationService],
  SampleService: ["samples", dataflow.SampleService],
  RunService: ["runs", dataflow.RunService],
  TaskService: ["tasks", dataflow.TaskService],
  TrajectoryService: ["trajectories", dataflow.TrajectoryService],
  VersionService: ["versions", dataflow.VersionService],
};
const clients = new Map<string, astraflow.Client>();
const streams = new Map<string, { messages: AsyncGenerator<any>; method: DescMethod }>();
const pushes = new Map<string, astraflow.PushStream>();
const sessions = new Map<string, OpenSession>();

function named<Value>(map: Map<string, Value>, operation: Operation, key: string): Value {
  const value = map.get(operation[key] ?? "main");
  if (value === undefined) throw new Error(`no ${key} ${operation[key] ?? "main"} is open`);
  return value;
}

/** The client that an operation names; with `as`, as the holder of that credential. */
function clientOf(operation: Operation): astraflow.Client {
  const client = named(clients, operation, "client");
  return operation["as"] === undefined ? client : client.as(operation["as"]);
}

function rpcOf(client: astraflow.Client, path: string): [Function, DescMethod] {
  const [service = "", name] = path.split("/");
  const [attribute, description] = SERVICES[service] ?? ["runs", dataflow.RunService];
  const method = description.methods.find((found) => found.name === name);
  if (method === undefined) throw new Error(`no rpc ${path}`);
  return [(client[attribute] as Record<string, any>)[method.localName], method];
}

const OPERATIONS: Record<string, (operation: Operation) => Promise<unknown> | unknown> = {
  connect({ client = "main", address, token, retry_total_s: totalS }) {
    const retry = totalS === undefined ? {} : { retry: { totalMs: totalS * 1_000 } };
    clients.set(client, astraflow.connect(address, { ...(token ? { token } : {}), ...retry }));
  },
  async server_info(operation) {
    const info = await named(clients, operation, "client").serverInfo();
    return { contract_version: info.contractVersion, product_version: info.productVersion };
  },
  async call(operation) {
    const [rpc, method] = rpcOf(clientOf(operation), operation["rpc"]);
    const request = fromJson(method.input, operation["request"] ?? {});
    const options = operation["timeout_s"] ? { timeoutMs: operation["timeout_s"] * 1_000 } : {};
    const call = () => rpc(request, options);
    const id: string | undefined = operation["correlation_id"];
    return toJson(method.output, await (id === undefined ? call() : astraflow.correlated(id, call)));
  },
  "stream.open"(operation) {
    const [rpc, method] = rpcOf(clientOf(operation), operation["rpc"]);
    streams.set(operation["stream"] ?? "main", {
      messages: rpc(fromJson(method.input, operation["request"] ?? {})),
      method,
    });
  },
  async "stream.next"(operation) {
    const { messages, method } = named(streams, operation, "stream");
    const { done, value } = await messages.next();
    return done ? { ended: true } : toJson(method.output, value);
  },
  async "stream.close"(operation) {
    await named(streams, operation, "stream").messages.return(undefined);
  },
  encode_columns({ trajectory_id, token_ids, loss_mask, logprobs, version_spans }) {
    const versionSpans = version_spans.map(([start, end, version]: number[]) => ({
      start,
      end,
      version: BigInt(version!),
    }));
    const columns = { tokenIds: token_ids, lossMask: loss_mask, logprobs, versionSpans };
    return toJson(TrajectorySchema, astraflow.encodeColumns(columns, trajectory_id));
  },
  decode_columns({ message }) {
    // As from the wire, where columns lie at any offset.
    const received = fromBinary(
      TrajectorySchema,
      toBinary(TrajectorySchema, fromJson(TrajectorySchema, message)),
    );
    const { tokenIds, lossMask, logprobs, versionSpans } = astraflow.decodeColumns(received);
    return {
      token_ids: [...tokenIds],
      loss_mask: [...lossMask].map(Boolean),
      logprobs: [...logprobs],
      version_spans: versionSpans.map(({ start, end, version }) => [start, end, Number(version)]),
    };
  },
  "push.open"(operation) {
    pushes.set(operation["stream"] ?? "main", new astraflow.PushStream(clientOf(operation)));
  },
  async push(operation) {
    const stream = named(pushes, operation, "stream");
    const episodes: any[] = operation["episodes"];
    const results = await Promise.all(
      episodes.map((episode) => stream.push(fromJson(EpisodeSchema, episode))),
    );
    return results.map((result) => toJson(dataflow.PushResultSchema, result));
  },
  async "push.close"(operation) {
    return { all_answered: await named(pushes, operation, "stream").close() };
  },
  "session.open": openSession,
  "session.next": (operation) => named(sessions, operation, "session").events.next(),
  "session.finish"(operation) {
    named(sessions, operation, "session").leases.get(operation["lease_id"])?.resolve();
  },
  "session.fail"(operation) {
    const { reason, detail = "", retryable = true } = operation;
    const failed = new astraflow.TaskFailed(reason, detail, retryable);
    named(sessions, operation, "session").leases.get(operation["lease_id"])?.reject(failed);
  },
  async "session.close"(operation) {
    const open = named(sessions, operation, "session");
    open.stop.abort();
    await open.served;
  },
  async reset() {
    for (const { stop } of sessions.values()) stop.abort();
    await Promise.allSettled([...sessions.values()].map(({ served }) => served));
    await Promise.all([...pushes.values()].map((stream) => stream.close({ timeoutMs: 0 })));
    for (const client of clients.values()) client.close();
    for (const map of [sessions, pushes, streams, clients]) map.clear();
  },
};

async function openSession(operation: Operation): Promise<void> {
  const client = named(clients, operation, "client");
  const { run_id: runId, node_id: nodeId, max_concurrent_tasks: maxConcurrentTasks } = operation;
  const node = { runId, nodeId, maxConcurrentTasks };
  const session = await astraflow.joinRun(client, node);
  const [stop, events, leases] = [new AbortController(), new Events(), new Map()];
  const servingVersions = Object.fromEntries(
    Object.entries(operation["serving_versions"] ?? {}).map(([policy, version]) => [
      policy,
      BigInt(version as number),
    ]),
  );
  const run = async (lease: Lease, signal: AbortSignal) => {
    events.add({ lease: toJson(LeaseSchema, lease) });
    signal.addEventListener("abort", () =>
      events.add({ cancelled: lease.leaseId, reason: String(signal.reason) }),
    );
    await new Promise<void>((resolve, reject) => {
      leases.set(lease.leaseId, { resolve, reject });
      signal.addEventListener("abort", () => resolve());
    });
  };
  const onVersion = ({ policyId, version }: dataflow.Version) =>
    events.add({ version: { policy_id: policyId, version: Number(version) } });
  const served = session.serve(
    { run, onVersion, state: () => ({ servingVersions }) },
    { signal: stop.signal, drainMs: 0 },
  );
  served.then(
    (reason) => events.add({ ended: reason }),
    (error: unknown) => events.add({ error: described(error) }),
  );
  sessions.set(operation["session"] ?? "main", { session, stop, served, events, leases });
}

function described(error: unknown): JsonObject {
  if (!(error instanceof astraflow.AstraflowError)) throw error;
  const branches = {
    retryable: astraflow.RetryableError,
    request: astraflow.RequestError,
    state: astraflow.StateError,
  };
  const branch = Object.entries(branches).find(([, kind]) => error instanceof kind)?.[0] ?? "other";
  const retryAfterS = error.retryAfterMs === undefined ? null : error.retryAfterMs / 1_000;
  const { reason, code, message } = error;
  return { reason, code, branch, message, metadata: { ...error.metadata }, retry_after_s: retryAfterS };
}

async function answer(line: string): Promise<void> {
  const operation: Operation = JSON.parse(line);
  let reply: Operation;
  try {
    const run = OPERATIONS[operation["op"]];
    reply = run === undefined ? { unsupported: operation["op"] } : { answer: (await run(operation)) ?? {} };
  } catch (error) {
    try {
      reply = { error: described(error) };
    } catch {
      reply = { crashed: error instanceof Error ? error.stack : String(error) };
    }
  }
  process.stdout.write(`${JSON.stringify({ id: operation["id"], ...reply })}\n`);
}

createInterface({ input: process.stdin })
  .on("line", (line) => void answer(line))
  .on("close", () => process.exit(0));

// What the server says, as JSON of its public rpcs (docs/contracts.md), and the stream of a run's status.

export interface Version {
  version: number;
  step: number;
  delta_bytes: number;
  snapshot_bytes: number;
  density: number;
  publish_time: string | null;
}

export interface Policy {
  policy_id: string;
  version: Version | null;
  last_finished_step: number;
  trainer_epoch: number;
  outstanding_groups: number;
  ready_groups: number;
  unpublished_groups: number;
  acceptance: number;
  credit: number;
  staleness: { p50: number; p99: number; max: number } | null;
  recent_training_reward: number | null;
  frozen: boolean;
  external: boolean;
}

export interface EngineLoad {
  policy_id: string;
  running: number;
  waiting: number;
  slots: number;
  kv_usage: number | null;
  tokens_per_s: number;
}

export interface NodeStatus {
  node_id: string;
  restarts: number;
  leases: number;
  episodes: number;
  trajectories: number;
  tokens: number;
  serving_versions: Record<string, number>;
  version_lags: Record<string, number>;
  last_seen_time: string | null;
  waiting_for: string;
  connected: boolean;
  region: string;
  pool: string;
  max_concurrent_tasks: number;
  engine_restarts: number;
  drain_reason: string;
  join_time: string | null;
  weight_faults: unknown[];
  hardware: string;
  engine_loads: EngineLoad[];
  tokens_per_s: number;
  engine_faults: { reason: string; detail: string; policy_id: string }[];
  poisoned: number;
  task_s: number | null;
  follow_s: number | null;
}

export interface Evaluation {
  policy_id: string;
  version: number;
  num_samples: number;
  num_planned: number;
  mean_reward: number | null;
  complete: boolean;
  metrics: Record<string, number | null>;
}

export interface Wait {
  stage: string;
  policy_id: string;
  reason: string;
  detail: string;
  waited_s: number;
  released_by: string;
  progress: number | null;
}

export interface Failures {
  reason: string;
  detail: string;
  count: number;
  in_a_row: number;
  task_id: string;
  node_id: string;
  last_time: string | null;
}

export interface Balance {
  policy_id: string;
  verdict: string;
  sentence: string;
  trainer_wait_share: number;
  num_steps: number;
}

export interface Status {
  state: string;
  run_id: string;
  trajectories: Record<string, number> & { dropped: Record<string, number> };
  policies: Policy[];
  nodes: NodeStatus[];
  evaluations: Evaluation[];
  waits: Wait[];
  dead_letters: number;
  failures: Failures[];
  stopped_for: string;
  read_time: string | null;
  archive: { waiting: number; written: number; written_bytes: number; given_up: number; problem: string } | null;
  balances: Balance[];
}

export interface Run {
  run_id: string;
  state: string;
  create_time: string | null;
  recipe_yaml: string;
  stopped_for: string;
}

export interface Steps {
  steps: number[];
  finish_times: string[];
  series: { name: string; mean: (number | null)[]; min: (number | null)[]; max: (number | null)[] }[];
  total: number;
}

export interface RunEvent {
  event_id: string;
  time: string;
  kind: string;
  subject: string;
  detail: string;
}

export interface Sample {
  sample_id: string;
  policy_id: string;
  step: number;
  reason: string;
  batch_id: string;
  episode_id: string;
  end_time: string | null;
  excerpt?: string;
  item: {
    trajectory_id: string;
    group_id: string;
    task_id: string;
    role: string;
    source: string;
    member: number;
    turn: number;
    reward: number;
    num_tokens: number;
    num_trainable_tokens: number;
    min_version: number;
    max_version: number;
    truncated: boolean;
    node_id: string;
  };
}

export interface Content extends Sample {
  token_ids: number[];
  texts: string[] | null;
  no_texts: string;
  loss_mask: boolean[];
  logprobs: number[];
  trainer_logprobs: (number | null)[] | null;
  version_spans: [number, number, number][];
  turn_spans: { start: number; end: number; role: string; reward: number }[];
}

export interface Session {
  subject: string;
  roles: string[];
  process: string;
}

/** An answer that is a refusal: a slug, a text with the remedy, and the HTTP status. */
export class Refusal extends Error {
  constructor(
    readonly slug: string,
    message: string,
    readonly status: number,
    /** Why a token was refused: `missing`, `expired`, `run`, … */
    readonly why = "",
  ) {
    super(message);
  }
}

async function refusalOf(answer: Response): Promise<Refusal> {
  const text = await answer.text();
  try {
    const body = JSON.parse(text) as { error: string; message: string; reason?: string; metadata?: Record<string, string> };
    return new Refusal(body.error, body.message, answer.status, body.metadata?.reason ?? body.reason);
  } catch {
    return new Refusal("HTTP", text || answer.statusText, answer.status);
  }
}

export async function get<T>(path: string, query: Record<string, string> = {}): Promise<T> {
  const search = new URLSearchParams(query).toString();
  let answer: Response;
  try {
    answer = await fetch(search ? `${path}?${search}` : path, { headers: { accept: "application/json" }, signal: AbortSignal.timeout(PATIENCE_MS) });
  } catch (error) {
    const is_late = error instanceof DOMException && error.name === "TimeoutError";
    throw new Refusal("UNAVAILABLE", is_late ? `the server has answered nothing for ${PATIENCE_MS / 1000} s` : "the server does not answer", 0);
  }
  if (!answer.ok) throw await refusalOf(answer);
  return (await answer.json()) as T;
}

const rpc = <T>(name: string, request: object): Promise<T> =>
  get<T>(`/api/rpc/${name}`, { request: JSON.stringify(request) });

export const session = (): Promise<Session> => get<Session>("/api/session");
export const status = (run_id: string): Promise<Status> => rpc("AdminService/Status", { run_id });

export async function runs(): Promise<Run[]> {
  const found: Run[] = [];
  for (let page_token = ""; ; ) {
    const page = await rpc<{ runs: Run[]; next_page_token: string }>("RunService/ListRuns", { page_size: 100, page_token });
    found.push(...page.runs);
    page_token = page.next_page_token;
    if (!page_token || found.length >= 1000) return found;
  }
}

export const steps = (run_id: string, policy_id: string, names: string[], max_points: number): Promise<Steps> =>
  rpc("AdminService/ListSteps", { run_id, policy_id, names, max_points });

export const events = (run_id: string, page_token = ""): Promise<{ events: RunEvent[]; next_page_token: string }> =>
  rpc("AdminService/ListEvents", { run_id, page_size: 200, page_token });

export const versions = (run_id: string, policy_id: string): Promise<{ versions: Version[] }> =>
  rpc("VersionService/ListVersions", { run_id, policy_id, page_size: 500 });

export type SampleQuery = Record<string, string | number | string[] | undefined> & { run_id: string };

export const samples = (query: SampleQuery): Promise<{ samples: Sample[]; next_page_token: string }> =>
  rpc("SampleService/ListSamples", query);

export const search = (
  query: SampleQuery,
  text: string,
): Promise<{ samples: Sample[]; next_page_token: string; searched: number; no_texts: string }> =>
  get("/api/search", { request: JSON.stringify(query), text });

export const sample = (run_id: string, sample_id: string): Promise<Content> =>
  get("/api/sample", { run_id, sample_id });

export const exportAddress = (query: SampleQuery, text: string, format: "jsonl" | "parquet"): string =>
  `/api/export?${new URLSearchParams({ request: JSON.stringify(query), text, format })}`;

export interface Listener {
  status: (status: Status) => void;
  /** `text` is for people; empty while all is well. */
  trouble: (text: string) => void;
  /** The server answers, but not this; a unary call says why. */
  refused: () => void;
}

/** Longer than a server with nothing to say says so. */
const SILENCE_MS = 12_000;
const PATIENCE_MS = 30_000;
/** Until what was refused is asked for again. */
const REFUSED_MS = 5_000;

/** Follows the status of a run until `close`. It reconnects for ever, and says when the server is silent or was started anew. */
export class Watch {
  private source: EventSource | null = null;
  private process = "";
  private lost = 0;
  private timer = 0;
  private silence = 0;
  private was_refused = false;
  private closed = false;

  constructor(
    private readonly run_id: string,
    private readonly listener: Listener,
  ) {
    this.open();
  }

  close(): void {
    this.closed = true;
    this.source?.close();
    window.clearTimeout(this.timer);
    window.clearTimeout(this.silence);
  }

  private heard(): void {
    window.clearTimeout(this.silence);
    this.silence = window.setTimeout(() => {
      this.lose(`The server has answered nothing for ${SILENCE_MS / 1000} s: it hangs, or the network does; what is shown is what it said last. Trying again …`);
    }, SILENCE_MS);
  }

  private lose(text: string): void {
    this.lost ||= Date.now();
    this.listener.trouble(text);
    this.again(2000);
  }

  private open(): void {
    const query = new URLSearchParams({ request: JSON.stringify({ run_id: this.run_id, interval_duration: "2s" }) });
    this.was_refused = false;
    const source = new EventSource(`/api/rpc/AdminService/Watch?${query}`);
    this.source = source;
    this.heard();
    for (const kind of ["hello", "message", "refused", "beat"]) source.addEventListener(kind, () => this.heard());
    source.addEventListener("hello", (event) => this.greeted((JSON.parse(event.data) as Session).process));
    source.addEventListener("message", (event) => {
      this.listener.status((JSON.parse(event.data) as { status: Status }).status);
    });
    source.addEventListener("refused", (event) => {
      this.listener.trouble((JSON.parse(event.data) as { message: string }).message);
      this.was_refused = true;
      this.listener.refused();
    });
    source.addEventListener("bye", () => this.again(this.was_refused ? REFUSED_MS : 0));
    source.onerror = () => {
      const is_answered = source.readyState === EventSource.CLOSED;
      this.lose("The server does not answer; what is shown is what it said last. Trying again …");
      if (is_answered) this.listener.refused();
    };
  }

  private greeted(process: string): void {
    const restarted = this.process !== "" && this.process !== process;
    if (restarted) this.listener.trouble(`The server was started anew at ${new Date().toLocaleTimeString("en-GB")}; the run goes on.`);
    else if (this.lost) this.listener.trouble("");
    this.process = process;
    this.lost = 0;
  }

  private again(wait_ms: number): void {
    this.source?.close();
    window.clearTimeout(this.timer);
    if (!this.closed) this.timer = window.setTimeout(() => this.open(), wait_ms || 50);
  }
}

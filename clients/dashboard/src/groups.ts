// What the steps of a run are looked at by, group by group: which series make which curve, and what it tells.
import type { Steps } from "./api";
import { join, type Drawing, type Line, type Values } from "./charts";
import type { Unit } from "./format";

/** Series of one policy by name. */
export type Read = (name: string) => Series;
export interface Series {
  mean: Values;
  min: Values;
  max: Values;
}

export interface CurveLine {
  label: string;
  /** A series, or what is made of several. */
  of: string | ((read: Read) => Values);
  low?: string;
  high?: string;
  dashed?: boolean;
}

export interface Curve {
  title: string;
  unit: Unit;
  help: string;
  missing?: string;
  /** Series that `of` functions read. */
  needs?: string[];
  /** One line: each policy has it. Several: those of the chosen policy. */
  lines: CurveLine[] | ((names: string[]) => CurveLine[]);
}

export interface Group {
  id: string;
  title: string;
  about: string;
  curves: Curve[];
}

/** Where there is something to divide by. */
const over = (above: Values, below: Values): Values =>
  above.map((value, index) => {
    const by = below[index];
    return value === null || value === undefined || !by ? null : value / by;
  });
const ratio = (top: string, bottom: string) => (read: Read): Values => over(read(top).mean, read(bottom).mean);

/** How much a counter grew a step. */
const growth = (name: string) => (read: Read, steps: number[]): Values => {
  const values = read(name).max.length ? read(name).max : read(name).mean;
  return values.map((value, index) => {
    const before = values[index - 1];
    const passed = (steps[index] ?? 0) - (steps[index - 1] ?? 0);
    return value === null || before === null || before === undefined || passed <= 0 ? null : Math.max(0, (value - before) / passed);
  });
};

const STEPS = "\u0000steps";
const grown = (name: string) => (read: Read): Values => growth(name)(read, read(STEPS).mean as number[]);

export const GROUPS: Group[] = [
  {
    id: "progress",
    title: "Progress",
    about: "Does it learn?",
    curves: [
      {
        title: "Reward",
        unit: "",
        help: "Mean of each step's batch; the band is its 10th to 90th percentile.",
        lines: [{ label: "reward", of: "reward_mean", low: "reward_p10", high: "reward_p90" }],
      },
      {
        title: "Reward by role",
        unit: "",
        help: "Mean of each role that the policy plays; the band is its 10th to 90th percentile.",
        missing: "No finished step tells the rewards of roles apart.",
        lines: (names) =>
          names.filter((name) => name.startsWith("reward_mean/")).map((name) => {
            const role = name.slice("reward_mean/".length);
            return { label: role, of: name, low: `reward_p10/${role}`, high: `reward_p90/${role}` };
          }),
      },
      {
        title: "Reward, percentiles",
        unit: "",
        help: "Of the trajectories of a step: a tenth are below the lowest line, half below the middle one.",
        lines: [
          { label: "10th", of: "reward_p10", dashed: true },
          { label: "median", of: "reward_p50" },
          { label: "90th", of: "reward_p90", dashed: true },
        ],
      },
      {
        title: "Groups without signal",
        unit: "%",
        help: "Share of groups whose rewards are all alike: nothing is learned from them.",
        needs: ["num_zero_variance_groups", "num_groups"],
        lines: [{ label: "all alike", of: ratio("num_zero_variance_groups", "num_groups") }],
      },
      {
        title: "Truncated",
        unit: "%",
        help: "Share of trajectories that a limit of tokens cut off.",
        lines: [{ label: "truncated", of: "truncated_fraction" }],
      },
    ],
  },
  {
    id: "stability",
    title: "Stability",
    about: "Is what is trained what was sampled, and does the policy stay alive?",
    curves: [
      {
        title: "KL between engine and trainer",
        unit: "nats",
        help: "Per token. What staleness and the engine's arithmetic add up to.",
        lines: [{ label: "mismatch KL", of: "mismatch_kl" }],
      },
      {
        title: "Ratio to the anchor",
        unit: "",
        help: "Mean, 99th percentile and largest over the tokens of a step.",
        lines: [
          { label: "largest", of: "ratio_max" },
          { label: "mean", of: "ratio_mean" },
          { label: "99th percentile", of: "ratio_p99", dashed: true },
        ],
      },
      {
        title: "Clipped tokens",
        unit: "%",
        help: "Share of tokens whose ratio is cut, from above and from below.",
        lines: [
          { label: "from above", of: "clip_fraction_up" },
          { label: "from below", of: "clip_fraction_down" },
        ],
      },
      { title: "Entropy", unit: "nats", help: "Of the next token. Near 0 the policy has one answer left.", lines: [{ label: "entropy", of: "entropy" }] },
      { title: "Gradient norm", unit: "", help: "Before clipping.", lines: [{ label: "norm", of: "grad_norm" }] },
      { title: "Loss", unit: "", help: "Its level says little; jumps say much.", lines: [{ label: "loss", of: "loss" }] },
    ],
  },
  {
    id: "freshness",
    title: "Freshness",
    about: "How old is what is trained on, and what was dropped?",
    curves: [
      {
        title: "Staleness",
        unit: "versions",
        help: "Version that a step starts from, less the oldest that sampled its tokens.",
        lines: [
          { label: "mean", of: "staleness_mean" },
          { label: "largest", of: "staleness_max", dashed: true },
        ],
      },
      {
        title: "Staleness, where it arose",
        unit: "versions",
        help: "Means. In flight: newest less oldest version that sampled a trajectory. In queue: version that the step starts from, less that newest.",
        lines: [
          { label: "in flight", of: "staleness_in_flight_mean" },
          { label: "in queue", of: "staleness_in_queue_mean" },
        ],
      },
      {
        title: "In flight and in queue",
        unit: "groups",
        help: "Groups that nodes sample, and complete groups that wait for a batch.",
        lines: [
          { label: "in flight", of: "data.outstanding" },
          { label: "in queue", of: "data.ready" },
        ],
      },
      {
        title: "Dropped, by reason",
        unit: "trajectories/step",
        help: "Trajectories of the whole run that ended untrained.",
        missing: "Nothing was dropped while these steps were taken.",
        lines: (names) =>
          names.filter((name) => name.startsWith("data.dropped.")).map((name) => ({ label: name.slice(13).replaceAll("_", " "), of: grown(name) })),
      },
      {
        title: "Stale tokens corrected",
        unit: "tokens",
        help: "Tokens that were masked, or count for less, because they are too old.",
        lines: [{ label: "tokens", of: "num_stale_tokens" }],
      },
    ],
  },
  {
    id: "shape",
    title: "Shape",
    about: "How long are answers, and what do episodes look like?",
    curves: [
      {
        title: "Tokens a trajectory",
        unit: "tokens",
        help: "Tokens that the policy generated.",
        lines: [
          { label: "mean", of: "completion_tokens_mean" },
          { label: "median", of: "completion_tokens_p50" },
          { label: "90th percentile", of: "completion_tokens_p90" },
          { label: "longest", of: "completion_tokens_max", dashed: true },
        ],
      },
      {
        title: "Tail",
        unit: "",
        help: "Longest trajectory over the median: what a step that waits for all would wait for.",
        needs: ["completion_tokens_max", "completion_tokens_p50"],
        lines: [{ label: "longest / median", of: ratio("completion_tokens_max", "completion_tokens_p50") }],
      },
      {
        title: "Turns an episode",
        unit: "",
        help: "Answers of the policy that were trained on, an episode.",
        lines: [{ label: "turns", of: "turns_mean" }],
      },
      {
        title: "Tool calls that failed",
        unit: "%",
        help: "Of the calls that episodes accepted since the step before made.",
        missing: "No tool was called while these steps were taken, or no environment counts calls.",
        needs: ["data.tool_errors", "data.tool_calls"],
        lines: [{ label: "failed", of: (read) => over(grown("data.tool_errors")(read), grown("data.tool_calls")(read)) }],
      },
      { title: "Trajectories a step", unit: "", help: "Those that were trained on.", lines: [{ label: "trajectories", of: "num_trained_trajectories" }] },
      {
        title: "Versions within a trajectory",
        unit: "versions",
        help: "Most weight versions that sampled one trajectory.",
        lines: [{ label: "spans", of: "num_version_spans_max" }],
      },
    ],
  },
  {
    id: "trainer",
    title: "Trainer",
    about: "Where does the time of a step go?",
    curves: [
      {
        title: "Time of a step",
        unit: "s",
        help: "Waiting for a batch or for versions to be published, and computing.",
        lines: [
          { label: "waits", of: "wait_s" },
          { label: "computes", of: "train_s" },
          { label: "publish holds it", of: "publish_wait_s", dashed: true },
          { label: "checkpoint holds it", of: "checkpoint_wait_s", dashed: true },
        ],
      },
      {
        title: "Share of time waited",
        unit: "%",
        help: "Above a third, the trainer wants more nodes.",
        needs: ["wait_s", "train_s"],
        lines: [
          {
            label: "waits",
            of: (read) => {
              const trains = read("train_s").mean;
              return read("wait_s").mean.map((waits, index) => {
                const total = (waits ?? NaN) + (trains[index] ?? NaN);
                return total > 0 ? (waits ?? 0) / total : null;
              });
            },
          },
        ],
      },
      {
        title: "Tokens trained",
        unit: "tokens/s",
        help: "Tokens of a step over its whole time.",
        needs: ["num_tokens", "wait_s", "train_s"],
        lines: [
          {
            label: "tokens/s",
            of: (read) => {
              const waits = read("wait_s").mean;
              const trains = read("train_s").mean;
              return read("num_tokens").mean.map((tokens, index) => {
                const total = (waits[index] ?? NaN) + (trains[index] ?? NaN);
                return tokens !== null && total > 0 ? tokens / total : null;
              });
            },
          },
        ],
      },
      { title: "Learning rate", unit: "", help: "Of the step.", lines: [{ label: "rate", of: "learning_rate" }] },
      { title: "Bytes fetched a step", unit: "B", help: "Payloads that the trainer's ranks received.", lines: [{ label: "bytes", of: "fetched_bytes" }] },
    ],
  },
];

export const DATA_PLANE: Group = {
  id: "data",
  title: "Data plane",
  about: "Is every trajectory accounted for?",
  curves: [
    { title: "Leases held", unit: "", help: "Tasks that nodes hold when a step ends.", lines: [{ label: "leases", of: "data.leases" }] },
    {
      title: "Trajectories",
      unit: "trajectories/step",
      help: "Accepted from nodes, a step.",
      needs: ["data.ingested"],
      lines: [{ label: "ingested", of: grown("data.ingested") }],
    },
  ],
};

/** Names that a group reads, of those that there are. */
export function needed(group: Group, names: string[]): string[] {
  const wanted = new Set<string>();
  for (const curve of group.curves) {
    for (const need of curve.needs ?? []) wanted.add(need);
    for (const line of linesOf(curve, names)) {
      if (typeof line.of === "string") wanted.add(line.of);
      for (const edge of [line.low, line.high]) if (edge) wanted.add(edge);
    }
    if (typeof curve.lines === "function") names.filter((name) => /^(reward_mean|data\.dropped)/.test(name)).forEach((name) => wanted.add(name));
  }
  return names.filter((name) => wanted.has(name));
}

export const linesOf = (curve: Curve, names: string[]): CurveLine[] =>
  typeof curve.lines === "function" ? curve.lines(names) : curve.lines;

export function reader(steps: Steps): Read {
  const found = new Map<string, Series>(steps.series.map((each) => [each.name, each]));
  found.set(STEPS, { mean: steps.steps, min: [], max: [] });
  const none: Values = steps.steps.map(() => null);
  return (name) => found.get(name) ?? { mean: none, min: [], max: [] };
}

export interface OfPolicy {
  policy: string;
  label: string;
  colour: number;
  steps: Steps;
  names: string[];
}

/** The lines of a curve: of all policies where it has one line, of the chosen one where it has several. */
export function drawing(curve: Curve, policies: OfPolicy[], chosen: string): Drawing {
  const alone = linesOf(curve, policies[0]?.names ?? []).length === 1 && typeof curve.lines !== "function";
  const shown = alone ? policies : policies.filter((each) => each.policy === chosen);
  return join(
    shown.map((each) => {
      const read = reader(each.steps);
      const lines = linesOf(curve, each.names).map((line, index): Line => {
        const series = typeof line.of === "string" ? read(line.of) : null;
        const values = series ? series.mean : (line.of as (read: Read) => Values)(read);
        const low = line.low ? read(line.low).mean : series?.min;
        const high = line.high ? read(line.high).mean : series?.max;
        return {
          label: alone && policies.length > 1 ? each.label : line.label,
          values,
          low: low?.some((value) => value !== null) ? low : undefined,
          high: high?.some((value) => value !== null) ? high : undefined,
          colour: alone ? each.colour : index,
          dashed: line.dashed,
        };
      });
      return { x: each.steps.steps, lines };
    }),
  );
}

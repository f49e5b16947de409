// Runs beside each other, curve by curve.
import { runs, status } from "./api";
import { Chart, join } from "./charts";
import { el, empty, fill } from "./dom";
import { drawing, type Group, type OfPolicy } from "./groups";
import { seriesOf } from "./run";
import { noRun } from "./runs";
import { drop, keep } from "./theme";
import { whyOf } from "./words";
import type { Refused, View } from "./view";

const MAX_RUNS = 6;

const COMPARED: Group = {
  id: "compare",
  title: "Compare runs",
  about: "",
  curves: [
    { title: "Reward", unit: "", help: "Mean of each step's batch.", lines: [{ label: "reward", of: "reward_mean" }] },
    { title: "Entropy", unit: "nats", help: "Of the next token.", lines: [{ label: "entropy", of: "entropy" }] },
    { title: "KL between engine and trainer", unit: "nats", help: "Per token.", lines: [{ label: "KL", of: "mismatch_kl" }] },
    { title: "Staleness", unit: "versions", help: "Mean over the tokens of a step.", lines: [{ label: "mean", of: "staleness_mean" }] },
    { title: "Tokens a trajectory", unit: "tokens", help: "Mean that the policy generated.", lines: [{ label: "mean", of: "completion_tokens_mean" }] },
    { title: "Gradient norm", unit: "", help: "Before clipping.", lines: [{ label: "norm", of: "grad_norm" }] },
    { title: "Time waited", unit: "s", help: "For a batch, or for versions to be published, a step.", lines: [{ label: "waits", of: "wait_s" }] },
    { title: "Time computed", unit: "s", help: "From batch to optimizer step.", lines: [{ label: "computes", of: "train_s" }] },
  ],
};

export function compareView(content: HTMLElement, chosen: string[], refused: Refused): View {
  let closed = false;
  const charts: Chart[] = [];
  document.title = "Compare · AstraFlow";
  const show = async (): Promise<void> => {
    const all = await runs();
    if (closed) return;
    const boxes = all.map((run) => el("label.choice", {}, el("input", {
      type: "checkbox", checked: chosen.includes(run.run_id), change: (event) => {
        const rest = chosen.filter((id) => id !== run.run_id);
        const next = (event.target as HTMLInputElement).checked ? [...rest, run.run_id] : rest;
        location.hash = `#/compare/${next.map(encodeURIComponent).join(",")}`;
      },
    }), run.run_id));
    const grid = el("div.grid");
    const reasons = el("div");
    fill(content, el("h1", {}, "Compare runs"), el("fieldset.choices.card", {}, el("legend", {}, `Runs, ${MAX_RUNS} at most`), ...boxes), reasons, el("h2", {}, "Curves"), grid);
    if (chosen.length === 0) {
      grid.replaceWith(all.length ? empty("Choose runs to see their curves beside each other.") : noRun());
      return;
    }
    const asked = chosen.slice(0, MAX_RUNS);
    const states = await Promise.all(asked.map(status));
    fill(reasons, el("ul.why", {}, ...states.map((each) => el("li", {}, el("strong", {}, each.run_id), ` ${whyOf(each)}`))));
    const found: OfPolicy[] = (await Promise.all(states.map(async (each) => {
      const policies = each.policies.filter((policy) => !policy.frozen && !policy.external);
      return seriesOf(each.run_id, policies, COMPARED, each.run_id);
    }))).flat().map((each, colour) => ({ ...each, colour, label: each.label }));
    if (closed) return;
    for (const curve of COMPARED.curves) {
      const chart = keep(new Chart({ ...curve, group: "compare" }));
      charts.push(chart);
      grid.append(chart.element);
      chart.draw(join(found.map((each) => {
        const own = drawing(curve, [each], each.policy);
        return { x: own.x, lines: own.lines.map((line) => ({ ...line, label: each.label, colour: each.colour })) };
      })));
    }
  };
  show().catch((error: unknown) => { if (!closed) fill(content, refused(error)); });
  return { close: () => { closed = true; drop(charts); } };
}

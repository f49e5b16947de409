// The runs of this server.
import { runs, status, type Run, type Status } from "./api";
import { code, el, empty, fill, table } from "./dom";
import { ago, count, figure, percent } from "./format";
import { stateBadge, whyOf } from "./words";
import type { Refused, View } from "./view";

const EVERY_MS = 5000;
const MAX_ASKED = 20;

export const noRun = (): HTMLElement => empty("This server has no run that you may see.",
  code("astraflow dev quickstart"), " makes one on this machine; ", code("astraflow runs create"), " on a server.");

export function runsView(content: HTMLElement, refused: Refused): View {
  let closed = false;
  let timer = 0;
  const chosen = new Set<string>();
  document.title = "Runs · AstraFlow";

  const look = async (): Promise<void> => {
    try {
      const found = (await runs()).reverse();
      const states = await Promise.all(found.slice(0, MAX_ASKED).map((run) => status(run.run_id).catch(() => null)));
      if (!closed && !content.contains(document.activeElement?.closest("input") ?? null)) draw(found, states);
    } catch (error) {
      if (!closed) fill(content, refused(error));
    }
    if (!closed) timer = window.setTimeout(() => void look(), EVERY_MS);
  };

  const draw = (found: Run[], states: (Status | null)[]): void => {
    if (found.length === 0) {
      fill(content, el("h1", {}, "Runs"), noRun());
      return;
    }
    const rows = found.map((run, index) => ({ run, state: states[index] ?? null }));
    const compare = el("a.button", { href: "#/compare" }, "Compare the chosen");
    const choose = (run: Run): HTMLElement => el("input", {
      type: "checkbox", "aria-label": `Compare ${run.run_id}`, checked: chosen.has(run.run_id),
      change: (event) => {
        if ((event.target as HTMLInputElement).checked) chosen.add(run.run_id);
        else chosen.delete(run.run_id);
        compare.setAttribute("href", `#/compare/${[...chosen].map(encodeURIComponent).join(",")}`);
      },
    });
    const trained = (state: Status | null) => state?.policies.filter((policy) => !policy.frozen && !policy.external) ?? [];
    const list = table("Runs of this server", [
      { head: "Compare", cell: (row) => choose(row.run) },
      { head: "Run", cell: (row) => el("a.strong", { href: `#/run/${encodeURIComponent(row.run.run_id)}` }, row.run.run_id) },
      { head: "State", cell: (row) => stateBadge(row.run.state) },
      { head: "Policies", cell: (row) => trained(row.state).map((policy) => policy.policy_id).join(", ") },
      { head: "Step", number: true, cell: (row) => trained(row.state).map((policy) => count(policy.last_finished_step)).join(" / ") },
      { head: "Reward", number: true, cell: (row) => trained(row.state).map((policy) => figure(policy.recent_training_reward, "")).join(" / ") },
      { head: "Trainer waits", number: true, cell: (row) => row.state?.balances.map((each) => percent(each.trainer_wait_share)).join(" / ") },
      { head: "Nodes", number: true, cell: (row) => (row.state ? count(row.state.nodes.filter((node) => node.connected).length) : "–") },
      { head: "Why", cell: (row) => (row.state ? el("span.detail", {}, whyOf(row.state)) : "–") },
      { head: "Made", cell: (row) => ago(row.run.create_time) },
    ], rows);
    fill(content, el("div.heading", {}, el("h1", {}, "Runs"), found.length > 1 ? compare : null), el("div.card", {}, list));
  };

  void look();
  return { close: () => { closed = true; window.clearTimeout(timer); } };
}

// Slugs of the contracts as people say them.
import type { Status } from "./api";
import { el } from "./dom";

export const words = (slug: string): string => slug.replaceAll("_", " ");

export const stateBadge = (state: string): HTMLElement => el(`span.badge.${state}`, {}, state || "unknown");

const HAPPENED: Record<string, string> = {
  node_joined: "node joined",
  node_left: "node left",
  node_drained: "node drained",
  node_undrained: "node takes tasks again",
  leases_lost: "leases expired",
  engine_restarted: "engine restarted",
  trainer_claimed: "trainer began",
  trainer_left: "trainer ended",
  plugins_switched: "plug-ins switched",
  batch_voided: "batch taken back",
  batch_quarantined: "batch quarantined",
  task_failed: "task failed",
  task_conflict: "task left out",
  run_state: "run is",
};

export const happened = (kind: string): string => HAPPENED[kind] ?? words(kind);

/** How serious an event is: what is lost, what changes, what is only told. */
export const weight = (kind: string): "fault" | "change" | "info" =>
  ["leases_lost", "engine_restarted", "task_failed", "task_conflict", "batch_voided", "batch_quarantined"].includes(kind)
    ? "fault"
    : ["plugins_switched", "node_drained", "node_left", "trainer_left", "run_state"].includes(kind) ? "change" : "info";

const STAGES: Record<string, string> = {
  server: "Everything",
  data: "Everything that must be written",
  lease: "Handing out tasks",
  assemble: "Completing groups",
  batch: "Training",
  publish: "Publishing",
  activate: "Activating versions",
  evaluate: "Evaluating",
  archive: "The archive",
};

export const stage = (slug: string): string => STAGES[slug] ?? words(slug);

/** Why a run is as fast as it is, or does nothing, in a sentence. */
export function whyOf(status: Status): string {
  if (status.stopped_for) return `stopped: ${status.stopped_for}`;
  const several = status.balances.length > 1;
  const said = status.balances.map((each) => (several ? `${each.policy_id}: ${each.sentence}` : each.sentence));
  const [wait] = status.waits;
  if (said.length === 0 && wait) said.push(`${stage(wait.stage)} waits for ${words(wait.reason)}: ${wait.detail}`);
  return said.join("; ") || "Nothing waits.";
}

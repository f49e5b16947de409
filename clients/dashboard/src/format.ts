// Figures as people read them: few digits, units, nothing that jumps.

const SI = ["", "k", "M", "G", "T"];

export function number(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && size < 0.001) return value.toExponential(1);
  if (size < 1000) return String(Number(value.toPrecision(digits)));
  const power = Math.min(4, Math.floor(Math.log10(size) / 3));
  return `${Number((value / 1000 ** power).toPrecision(digits))} ${SI[power]}`.trim();
}

export const count = (value: number | null | undefined): string =>
  value === null || value === undefined ? "–" : value.toLocaleString("en-GB");

export const percent = (share: number | null | undefined): string =>
  share === null || share === undefined || !Number.isFinite(share)
    ? "–"
    : `${Number((share * 100).toPrecision(Math.abs(share) < 0.1 ? 2 : 3))} %`;

export function bytes(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = value < 1000 ? 0 : Math.min(4, Math.floor(Math.log10(value) / 3));
  return `${Number((value / 1000 ** power).toPrecision(3))} ${units[power]}`;
}

export function seconds(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value !== 0 && value < 0.001) return `${Number((value * 1e6).toPrecision(2))} µs`;
  if (value !== 0 && value < 1) return `${Number((value * 1000).toPrecision(3))} ms`;
  if (value < 120) return `${Number(value.toPrecision(3))} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return value < 172800 ? `${Number((value / 3600).toPrecision(3))} h` : `${Math.round(value / 86400)} d`;
}

export function ago(time: string | null, now = Date.now()): string {
  if (!time) return "–";
  const passed = (now - Date.parse(time)) / 1000;
  return passed < 2 ? "just now" : `${seconds(Math.floor(passed))} ago`;
}

export const clock = (time: string | number | null): string =>
  time === null ? "–" : new Date(time).toLocaleTimeString("en-GB");

export const moment = (time: string | null): string =>
  time === null ? "–" : new Date(time).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" });

export type Unit = "" | "%" | "s" | "B" | "nats" | "tokens" | "versions" | "groups" | "tokens/s" | "trajectories/step";

/** A figure with its unit. */
export function figure(value: number | null | undefined, unit: Unit): string {
  if (unit === "%") return percent(value);
  if (unit === "s") return seconds(value);
  if (unit === "B") return bytes(value);
  const text = number(value);
  return unit && text !== "–" ? `${text} ${unit}` : text;
}

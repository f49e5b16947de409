// Charts: a card with a title, a legend that tells the newest figures, and the curve; a sentence says the same to ears.
import uPlot from "uplot";
import { el, fill } from "./dom";
import { figure, number, type Unit } from "./format";

export type Values = (number | null)[];

export interface Line {
  label: string;
  values: Values;
  /** Position in the palette. */
  colour: number;
  low?: Values;
  high?: Values;
  dashed?: boolean;
  points?: boolean;
}

export interface Drawing {
  x: number[];
  lines: Line[];
}

export interface Caption {
  title: string;
  unit: Unit;
  help: string;
  xLabel?: string;
  /** What is said when no line has a figure. */
  missing?: string;
  /** Charts of one group show the same place under the pointer. */
  group?: string;
}

const HEIGHT = 190;
const style = (name: string): string => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (index: number): string => style(`--line-${(index % 8) + 1}`);

/** Puts series over different steps on one axis; what one of them lacks is a gap that lines pass over. */
export function join(parts: { x: number[]; lines: Line[] }[]): Drawing {
  const [first] = parts;
  if (!first) return { x: [], lines: [] };
  const same = parts.every((part) => part.x.length === first.x.length && part.x.at(-1) === first.x.at(-1));
  if (same) return { x: first.x, lines: parts.flatMap((part) => part.lines) };
  const x = [...new Set(parts.flatMap((part) => part.x))].sort((a, b) => a - b);
  const lines = parts.flatMap((part) => {
    const place = new Map(part.x.map((value, index) => [value, index]));
    const spread = (values?: Values): Values | undefined =>
      values?.length
        ? x.map((value) => {
            const index = place.get(value);
            return index === undefined ? (undefined as unknown as null) : (values[index] ?? null);
          })
        : undefined;
    return part.lines.map((line) => ({
      ...line,
      values: spread(line.values) ?? [],
      low: spread(line.low),
      high: spread(line.high),
    }));
  });
  return { x, lines };
}

const known = (values: Values): number[] => values.filter((value): value is number => Number.isFinite(value));

/** A chart that is drawn anew with other figures, as they come. */
export class Chart {
  readonly element: HTMLElement;
  private readonly legend = el("ul.legend");
  private readonly plot = el("div.plot");
  private readonly note = el("p.empty");
  private chart: uPlot | null = null;
  private shape = "";
  private drawing: Drawing = { x: [], lines: [] };

  constructor(private readonly caption: Caption) {
    this.note.hidden = true;
    this.element = el(
      "figure.card.chart",
      {},
      el("figcaption", {}, el("h3", {}, caption.title), el("p.help", {}, caption.help)),
      this.legend,
      this.plot,
      this.note,
    );
    new ResizeObserver(() => this.resize()).observe(this.plot);
  }

  draw(drawing: Drawing): void {
    this.drawing = drawing;
    const lines = drawing.lines.filter((line) => known(line.values).length > 0);
    this.note.hidden = lines.length > 0;
    this.plot.hidden = lines.length === 0;
    if (lines.length === 0) {
      this.note.textContent = this.caption.missing ?? "No finished step has this figure yet.";
      this.legend.replaceChildren();
      return;
    }
    this.tell(lines);
    const shape = lines.map((line) => `${line.label}|${line.colour}|${!!line.low}|${!!line.dashed}`).join("\n");
    const data = columns(drawing.x, lines);
    if (this.chart && shape === this.shape) this.chart.setData(data);
    else this.make(lines, data, shape);
  }

  /** After the colours of the page changed. */
  recolour(): void {
    this.shape = "";
    this.draw(this.drawing);
  }

  destroy(): void {
    this.chart?.destroy();
    this.chart = null;
  }

  private tell(lines: Line[]): void {
    const { unit, title, xLabel = "step" } = this.caption;
    fill(
      this.legend,
      ...lines.map((line) => {
        const mark = el(line.dashed ? "span.mark.dashed" : "span.mark");
        mark.style.color = colour(line.colour);
        return el("li", {}, mark, el("span.name", {}, line.label), el("span.value", {}, figure(known(line.values).at(-1), unit)));
      }),
    );
    const said = lines.map((line) => {
      const values = known(line.values);
      return `${line.label} from ${figure(values[0], unit)} to ${figure(values.at(-1), unit)}`;
    });
    const last = this.drawing.x.at(-1) ?? 0;
    this.plot.setAttribute("role", "img"); // not before: an image without a name is told to nobody
    this.plot.setAttribute("aria-label", `${title}, up to ${xLabel} ${last}: ${said.join("; ")}`);
  }

  private make(lines: Line[], data: uPlot.AlignedData, shape: string): void {
    this.chart?.destroy();
    this.plot.replaceChildren();
    this.shape = shape;
    this.chart = new uPlot(options(this.caption, lines, this.width(), data[0]?.length ?? 0), data, this.plot);
  }

  private resize(): void {
    const width = this.width();
    if (this.chart && width > 0 && Math.abs(this.chart.width - width) > 1) this.chart.setSize({ width, height: HEIGHT });
  }

  private width(): number {
    return Math.max(200, Math.floor(this.plot.clientWidth || 400));
  }
}

function columns(x: number[], lines: Line[]): uPlot.AlignedData {
  const data: (number | null | undefined)[][] = [x];
  for (const line of lines) {
    if (line.low?.length && line.high?.length) data.push(line.high, line.low);
    data.push(line.values);
  }
  return data as uPlot.AlignedData;
}

function options(caption: Caption, lines: Line[], width: number, num: number): uPlot.Options {
  const series: uPlot.Series[] = [{ label: caption.xLabel ?? "step" }];
  const bands: uPlot.Band[] = [];
  for (const line of lines) {
    const stroke = colour(line.colour);
    if (line.low?.length && line.high?.length) {
      const hidden = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
      bands.push({ series: [series.length, series.length + 1], fill: `${stroke}${lines.length > 1 ? "1c" : "2b"}` });
      series.push({ label: "", ...hidden }, { label: "", ...hidden });
    }
    series.push({
      label: line.label,
      stroke,
      width: 1.75,
      dash: line.dashed ? [5, 4] : undefined,
      spanGaps: true,
      points: { show: line.points || num < 2, size: 6 },
    });
  }
  const axis = { stroke: style("--muted"), font: "12px system-ui, sans-serif", ticks: { show: false } };
  const grid = { stroke: style("--grid"), width: 1 };
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    cursor: { y: false, sync: { key: caption.group ?? caption.title }, points: { size: 7 }, drag: { x: true, y: false } },
    scales: { x: { time: false }, y: { range: spread } },
    series,
    bands,
    axes: [
      { ...axis, grid: { show: false }, size: 28, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? number(tick, 4) : "")) },
      { ...axis, grid, size: 62, values: (_, ticks) => ticks.map((tick) => short(tick, caption.unit)) },
    ],
    hooks: { setCursor: [(chart) => under(chart, lines, caption)] },
  };
}

/** Shows the figures under the pointer in the legend, the newest ones when it leaves. */
function under(chart: uPlot, lines: Line[], caption: Caption): void {
  const card = chart.root.closest("figure");
  const shown = card?.querySelectorAll<HTMLElement>(".legend .value");
  const index = chart.cursor.idx;
  shown?.forEach((cell, place) => {
    const values = lines[place]?.values ?? [];
    const value = index === null || index === undefined ? known(values).at(-1) : values[index];
    cell.textContent = figure(value, caption.unit);
  });
}

/** What is written at a tick; ticks are sums, so that their 0 is only near it. */
function short(tick: number, unit: Unit): string {
  const value = Math.abs(tick) < 1e-12 ? 0 : tick;
  return unit === "%" || unit === "s" || unit === "B" ? figure(value, unit) : number(value);
}

function spread(_chart: uPlot, low: number | null, high: number | null): uPlot.Range.MinMax {
  if (low === null || high === null || !Number.isFinite(low) || !Number.isFinite(high)) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [Math.min(0, low * 1.2), Math.max(0, high * 1.2)];
  const room = (high - low) * 0.08;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

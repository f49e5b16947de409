// Charts are painted, so they are painted again when colours change.
import type { Chart } from "./charts";

const charts = new Set<Chart>();

export const keep = (chart: Chart): Chart => {
  charts.add(chart);
  return chart;
};

export function drop(dropped: Iterable<Chart>): void {
  for (const chart of dropped) {
    chart.destroy();
    charts.delete(chart);
  }
}

export const recolour = (): void => charts.forEach((chart) => chart.recolour());

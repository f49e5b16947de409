// Bundles the page into the folder that the dataflow server serves: three files, which ask nothing of any other server.
import { build } from "esbuild";
import { copyFile, mkdir } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const into = join(here, "../../services/astraflow_dataflow/dashboard/static");

await mkdir(into, { recursive: true });
await build({
  entryPoints: { app: join(here, "src/main.ts") },
  outdir: into,
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  legalComments: "inline",
  logLevel: "warning",
});
await copyFile(join(here, "src/index.html"), join(into, "index.html"));

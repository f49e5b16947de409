// Looks at the page in a real Chromium, as told by one JSON argument, and prints one JSON line of what it found:
//   {address, entry?, visits: [{name, hash, wait, width?, height?, dark?, picture?, fill?, click?, then?, focus?, keys?}], follow?}
// `entry` is a page that signs in. `follow` stays on one page while the caller changes what is behind it, each step
// announced by a line on stdout; a step waits for a text (`until`), or until the number in an element has grown (`grows`).
import { chromium } from "playwright-core";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const asked = JSON.parse(process.argv[2]);
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const browser = await chromium.launch({
  executablePath: asked.chromium,
  args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--font-render-hinting=none"],
});
const report = { console: [], dialogs: [], acted: [], violations: [], visits: {}, steps: [] };
const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const say = async (what) => {
  process.stdout.write(`${what}\n`);
  await lines.next();
};

async function opened({ width = 1440, height = 900, dark = false }) {
  const context = await browser.newContext({
    viewport: { width, height }, colorScheme: dark ? "dark" : "light", locale: "en-GB", timezoneId: "UTC", bypassCSP: false,
    reducedMotion: "reduce",
  });
  const page = await context.newPage();
  page.on("console", (message) => { if (["error", "warning"].includes(message.type())) report.console.push(message.text()); });
  page.on("pageerror", (error) => report.console.push(String(error)));
  page.on("dialog", (dialog) => { report.dialogs.push(dialog.message()); void dialog.dismiss(); });
  if (asked.entry) {
    await page.goto(asked.entry);
    await page.waitForURL(`http://${asked.address}/**`);
  }
  if (asked.token) {
    await page.goto(`http://${asked.address}/`);
    await page.fill("#token", asked.token);
    await page.click("button[type=submit]");
    await page.waitForSelector("#top button[type=submit]");
  }
  return { context, page };
}

async function awaited(page, one, selector) {
  try {
    await page.waitForSelector(selector, { timeout: 60000 });
  } catch (error) {
    process.stderr.write(`${one.name}: no ${selector}; console: ${report.console.join(" | ")}; the page says: ${await page.innerText("body")}\n`);
    throw error;
  }
}

// Visits that are only read share a page, each from an empty one on; to open a browser's context takes a second.
let reading = null;

async function visit(one) {
  const is_read = one.axe === false;
  const { context, page } = (is_read && reading) || (await opened(one));
  if (is_read) {
    reading = { context, page };
    await page.goto("about:blank");
  }
  const cdp = await context.newCDPSession(page);
  let transferred = 0;
  await cdp.send("Network.enable");
  cdp.on("Network.loadingFinished", (event) => { transferred += event.encodedDataLength; });
  await page.goto(`http://${asked.address}/${one.hash}`);
  await awaited(page, one, one.wait);
  if (one.settle) await page.waitForTimeout(one.settle);
  for (const [selector, value] of Object.entries(one.fill ?? {})) await page.fill(selector, value);
  for (const selector of one.click ?? []) { await page.click(selector); await page.waitForTimeout(150); }
  if (one.then) await awaited(page, one, one.then);
  if (one.focus) await page.focus(one.focus);
  for (const key of one.keys ?? []) await page.keyboard.press(key);
  const paint_ms = await page.evaluate(() => performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? null);
  report.visits[one.name] = { paint_ms, transferred, text: (await page.innerText("#content")).slice(0, 20000), title: await page.title(),
    wide: await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth) };
  report.acted.push(...(await page.evaluate(() => [
    ...(window.pwned ? ["a payload ran"] : []),
    ...[...document.querySelectorAll("#content script, #content img, #content iframe, #content svg, #content object, #content embed, #content [onerror], #content [onload], #content base, #content style, #content link, #content math")]
      .map((element) => element.outerHTML.slice(0, 200)),
    ...[...document.querySelectorAll("#content a")].map((link) => link.href).filter((href) => !href.startsWith("http")),
  ])));
  if (one.axe !== false) {
    // As the page's own policy lets no script be added, it is evaluated.
    await page.evaluate(axe);
    const found = await page.evaluate(() => window.axe.run(document, { runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"] }));
    for (const violation of found.violations) report.violations.push({ visit: one.name, id: violation.id, help: violation.help, nodes: violation.nodes.slice(0, 3).map((node) => node.html.slice(0, 200) + " | " + (node.any[0]?.message ?? "")) });
  }
  if (one.picture) await page.screenshot({ path: one.picture, fullPage: one.full ?? false, animations: "disabled" });
  if (!is_read) await context.close();
}

for (const one of asked.visits ?? []) await visit(one);

if (asked.follow) {
  const { context, page } = await opened(asked.follow);
  await page.goto(`http://${asked.address}/${asked.follow.hash}`);
  await page.waitForSelector(asked.follow.wait);
  for (const step of asked.follow.steps) {
    const shown = step.grows ? Number(await page.innerText(step.grows)) : 0;
    await say(step.say);
    if (step.grows) await page.waitForFunction(([of, before]) => Number(document.querySelector(of)?.innerText) > before, [step.grows, shown], { timeout: 60000 });
    else await page.waitForFunction((text) => document.querySelector("#content")?.innerText.includes(text), step.until, { timeout: 30000 });
    report.steps.push(step.until ?? Number(await page.innerText(step.grows)));
    // What fails while a server is away is said on the console by the browser itself.
    if (step.forgive) report.console.length = 0;
  }
  await context.close();
}

await browser.close();
process.stdout.write(`${JSON.stringify(report)}\n`);

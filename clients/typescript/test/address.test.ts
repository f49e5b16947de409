import assert from "node:assert/strict";
import { once } from "node:events";
import { readFileSync } from "node:fs";
import { createServer, type IncomingHttpHeaders } from "node:http2";
import type { AddressInfo } from "node:net";
import { test } from "node:test";
import { endpointOf, type TrustOptions } from "../src/address.js";
import { connect, formatJoin, InvalidArgumentError, parseJoin, type JoinString } from "../src/index.js";

const vectors = JSON.parse(readFileSync("../../tests/conformance/join_strings.json", "utf8"));
const JOIN = { address: "dataflow.example:7070", ca: [Buffer.from("MAMCAQU=", "base64")], token: "first" };
const joined = formatJoin({ publicCa: false, serverName: "", ...JOIN });

for (const { case: name, text, content, canonical = text } of vectors.good) {
  test(`a join string with ${name} says the same in every language`, () => {
    const join: JoinString = parseJoin(text);
    const ca = join.ca.map((each) => Buffer.from(each).toString("base64"));
    const { address, publicCa: public_ca, serverName: server_name, token } = join;
    assert.deepEqual({ address, ca, public_ca, server_name, token }, content);
    assert.equal(formatJoin(join), canonical);
  });
}

for (const { case: name, text, says } of vectors.bad) {
  test(`${name} is no join string, and is not repeated`, () => {
    assert.throws(
      () => parseJoin(text),
      (error) =>
        error instanceof InvalidArgumentError && error.message.includes(says) && !/s3cret/.test(error.message),
    );
  });
}

const unfit: [string, TrustOptions, RegExp][] = [
  ["10.0.0.5:7070", { token: "secret" }, /in the clear.*insecure/],
  ["10.0.0.5:7070", { serverName: "x" }, /for TLS/],
  ["10.0.0.5:7070", { ca: "c", publicCa: true }, /exclude each other/],
  ["10.0.0.5:7070", { ca: "c", clientCert: "c" }, /go together/],
  ["af1.abc", {}, /join string is damaged/],
];
for (const [target, options, says] of unfit) {
  test(`${target} with ${Object.keys(options)} is refused`, () => {
    assert.throws(() => connect(target, options), says);
  });
}

test("a token goes over TLS, to this machine, or at the caller's risk", () => {
  for (const [target, options] of [
    ["10.0.0.5:1", { publicCa: true }],
    ["10.0.0.5:1", { insecure: true }],
    ["127.0.0.1:1", {}],
  ] as const)
    assert.equal(endpointOf(target, { token: "t", ...options }).token, "t");
});

test("options replace what a join string says", () => {
  const endpoint = endpointOf(joined, { token: "mine", ca: "my authority", serverName: "inside" });
  assert.deepEqual([endpoint.token, endpoint.tls?.ca, endpoint.tls?.servername], ["mine", "my authority", "inside"]);
  assert.equal(endpointOf(joined, { publicCa: true }).tls?.ca, undefined);
  assert.match(String(endpointOf(joined).tls?.ca), /^-----BEGIN CERTIFICATE-----\nMAMCAQU=\n/);
  assert.equal(endpointOf(joined).baseUrl, "https://dataflow.example:7070");
});

test("a function is asked for the token at each call", async () => {
  const seen: (string | undefined)[] = [];
  const server = createServer();
  server.on("stream", (stream, headers: IncomingHttpHeaders) => {
    seen.push(headers.authorization);
    stream.respond({ ":status": 200, "content-type": "application/grpc", "grpc-status": "12" }, { endStream: true });
  });
  await once(server.listen(0, "127.0.0.1"), "listening");
  const client = connect(`127.0.0.1:${(server.address() as AddressInfo).port}`, {
    token: () => Promise.resolve(`token-${seen.length}`),
  });
  for (const _ of [1, 2]) await assert.rejects(client.serverInfo(), { reason: "UNIMPLEMENTED" });
  assert.deepEqual(seen, ["Bearer token-0", "Bearer token-1"]);
  client.close();
  server.close();
});

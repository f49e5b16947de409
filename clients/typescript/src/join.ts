/**
 * The join string: one line that says where a server is, how it proves who it is, and as whom to call it.
 *
 * The certificates of the authority travel in it, so no connection is made before the authority is known. It holds a
 * token: it is a secret. Its form is that of every language (tests/conformance/join_strings.json).
 */
import { InvalidArgumentError } from "./errors.js";

const PREFIX = "af1.";
const MAX_CHARS = 65_536;
const REMEDY = "; ask the server's operator for a new one (`astraflow join-token`)";

/** What a join string says. */
export interface JoinString {
  /** `HOST:PORT`. */
  address: string;
  /** Certificates, in DER, of the authorities that the server's certificate may come from. */
  ca: readonly Uint8Array[];
  /** The server's certificate comes from an authority that this machine trusts anyway. */
  publicCa: boolean;
  /** Name that the certificate must carry; empty takes the host of the address. */
  serverName: string;
  token: string;
}

/** Whether this is meant as a join string rather than as an address. */
export function isJoinString(text: string): boolean {
  return text.trim().startsWith(PREFIX);
}

/** Returns the one line. Equal contents give equal lines, in every language. */
export function formatJoin({ address, ca, publicCa, serverName, token }: JoinString): string {
  const content = {
    address,
    ca: ca.map((certificate) => Buffer.from(certificate).toString("base64")),
    public_ca: publicCa,
    server_name: serverName,
    token,
  };
  return PREFIX + Buffer.from(JSON.stringify(content)).toString("base64url");
}

/**
 * Reads a join string; white space around it is ignored, and so are keys that a newer release may add.
 *
 * @throws InvalidArgumentError, whose message never repeats the content.
 */
export function parseJoin(given: string): JoinString {
  const text = given.trim();
  if (!text.startsWith(PREFIX)) refuse(`a join string begins with '${PREFIX}'`);
  if (text.length > MAX_CHARS) refuse(`the join string has ${text.length} characters, at most ${MAX_CHARS}`);
  const content = contentOf(text.slice(PREFIX.length));
  const publicCa = content["public_ca"] ?? false;
  if (typeof publicCa !== "boolean") refuse("public_ca of the join string must be true or false");
  const join = {
    address: textOf(content, "address"),
    ca: certificatesOf(content["ca"] ?? []),
    publicCa,
    serverName: textOf(content, "server_name"),
    token: textOf(content, "token"),
  };
  requireAddress(join.address);
  if (join.ca.length > 0 === publicCa) {
    const which = publicCa ? "both ca and public_ca" : "neither ca nor public_ca";
    refuse(`the join string names ${which}: exactly one says whom to trust`);
  }
  return join;
}

/**
 * Requires `HOST:PORT`, with IPv6 hosts in brackets.
 *
 * @throws InvalidArgumentError for anything else.
 */
export function requireAddress(address: string): void {
  const parts = /^(?<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?<port>\d{1,5})$/.exec(address);
  const port = Number(parts?.groups?.["port"]);
  if (parts === null || port < 1 || port > 65_535) {
    throw new InvalidArgumentError(
      `address '${address}' must be HOST:PORT with a port of 1–65535: 127.0.0.1:7070, [::1]:7070`,
    );
  }
}

function contentOf(encoded: string): Record<string, unknown> {
  let content: unknown;
  try {
    content = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(decoded(encoded, "base64url")));
  } catch {
    refuse("the join string is damaged or was cut short");
  }
  if (typeof content !== "object" || content === null || Array.isArray(content))
    refuse("the join string holds no JSON object");
  return content as Record<string, unknown>;
}

function textOf(content: Record<string, unknown>, key: string): string {
  const value = content[key] ?? "";
  // A token is sent as a header, and a name is looked up: neither can hold anything else.
  if (typeof value !== "string" || !/^[!-~]*$/.test(value))
    refuse(`${key} of the join string must be printable ASCII without spaces`);
  return value;
}

function certificatesOf(given: unknown): Uint8Array[] {
  try {
    if (Array.isArray(given)) {
      const found = given.map((each) => decoded(each, "base64"));
      // Every certificate is a DER sequence of two length bytes at least.
      if (found.every((each) => each[0] === 0x30 && each.length > 4)) return found;
    }
  } catch {
    // Refused below.
  }
  refuse("ca of the join string must be a list of base64 DER certificates");
}

function decoded(text: unknown, encoding: "base64" | "base64url"): Uint8Array {
  // Buffer skips what it does not know.
  const alphabet = encoding === "base64" ? /^[A-Za-z0-9+/]*={0,2}$/ : /^[A-Za-z0-9_-]*={0,2}$/;
  if (typeof text !== "string" || !alphabet.test(text) || text.replace(/=+$/, "").length % 4 === 1)
    throw new Error("not base64");
  return Buffer.from(text, encoding);
}

function refuse(what: string): never {
  throw new InvalidArgumentError(`${what}${REMEDY}`);
}

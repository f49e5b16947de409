/** What a user says of a server: where it is, whom to trust, as whom to call. The one place that reads it. */
import { isIP } from "node:net";
import type { SecureClientSessionOptions } from "node:http2";
import { InvalidArgumentError } from "./errors.js";
import { isJoinString, parseJoin, requireAddress } from "./join.js";

/** A value, or a function that is called for each call to the server, so that a token can be replaced. */
export type Token = string | (() => string | Promise<string>);

/** How a server proves who it is, and as whom it is called; replaces what a join string says. */
export interface TrustOptions {
  /** Sent as bearer token; without one the caller is anonymous. */
  token?: Token;
  /** PEM certificates of the authorities that the server's certificate may come from. Turns TLS on. */
  ca?: string | Buffer;
  /** Trust the authorities that this machine trusts anyway. Turns TLS on. */
  publicCa?: boolean;
  /** Name that the server's certificate must carry; without it the host of the address. */
  serverName?: string;
  /** PEM certificate to show to a server that asks for one, with `clientKey`. */
  clientCert?: string | Buffer;
  clientKey?: string | Buffer;
  /** Send the token without TLS, to whoever listens on the way. For closed test networks only. */
  insecure?: boolean;
}

/** How to reach a server. */
export interface Endpoint {
  address: string;
  baseUrl: string;
  token: Token;
  /** Undefined without TLS. */
  tls: SecureClientSessionOptions | undefined;
}

/**
 * Returns how to reach the server that an address or a join string means.
 *
 * @throws InvalidArgumentError for anything else, and for options that do not fit.
 */
export function endpointOf(target: string, options: TrustOptions = {}): Endpoint {
  const join = isJoinString(target) ? parseJoin(target) : undefined;
  const address = join?.address ?? target;
  requireAddress(address);
  const { token = join?.token ?? "", clientCert: cert, clientKey: key, insecure = false } = options;
  const serverName = options.serverName ?? join?.serverName ?? "";
  const ca = options.publicCa ? options.ca : (options.ca ?? join?.ca.map(pem).join(""));
  const publicCa = options.publicCa ?? (join?.publicCa === true && options.ca === undefined);
  if (ca && publicCa) throw new InvalidArgumentError("ca and publicCa exclude each other: say whom to trust");
  if ((cert === undefined) !== (key === undefined))
    throw new InvalidArgumentError("clientCert and clientKey go together; give both or neither");
  const isSecure = Boolean(ca) || publicCa;
  if (!isSecure && (cert !== undefined || serverName))
    throw new InvalidArgumentError("serverName and clientCert are for TLS; say whom to trust: ca, or publicCa");
  if (token && !isSecure && !insecure && !isLoopback(hostOf(address))) {
    throw new InvalidArgumentError(
      `the token for ${address} would travel in the clear; say whom to trust (a join string, ca, or publicCa), or ` +
        "accept the risk with insecure",
    );
  }
  const tls = isSecure ? sessionOptions(serverName || hostOf(address), { ca, cert, key }) : undefined;
  return { address, baseUrl: `${isSecure ? "https" : "http"}://${address}`, token, tls };
}

function sessionOptions(
  name: string,
  { ca, cert, key }: { [name in "ca" | "cert" | "key"]: string | Buffer | undefined },
): SecureClientSessionOptions {
  return {
    ...(ca ? { ca } : {}),
    ...(cert && key ? { cert, key } : {}),
    // An address cannot be asked for by name; the certificate is compared with it all the same.
    ...(isIP(name) ? {} : { servername: name }),
  };
}

function pem(der: Uint8Array): string {
  const lines = Buffer.from(der).toString("base64").match(/.{1,64}/g) ?? [];
  return ["-----BEGIN CERTIFICATE-----", ...lines, "-----END CERTIFICATE-----", ""].join("\n");
}

function hostOf(address: string): string {
  return address.slice(0, address.lastIndexOf(":")).replace(/^\[|\]$/g, "");
}

function isLoopback(host: string): boolean {
  return host === "localhost" || host === "::1" || (isIP(host) === 4 && host.startsWith("127."));
}

/** The HTTP/2 connection of a client, with pings that find half-open links. */
import type { ClientHttp2Stream, Http2Session, SecureClientSessionOptions } from "node:http2";
import { Http2SessionManager } from "@connectrpc/connect-node";

const KEEPALIVE = { pingIntervalMs: 20_000, pingTimeoutMs: 10_000, pingIdleConnection: true };

/** Connects with the first request, and anew when the connection is lost. */
export class Connection extends Http2SessionManager {
  readonly #guarded = new WeakSet<Http2Session>();

  constructor(baseUrl: string, tls?: SecureClientSessionOptions) {
    super(baseUrl, KEEPALIVE, tls);
  }

  override async request(...request: Parameters<Http2SessionManager["request"]>): Promise<ClientHttp2Stream> {
    const stream = await super.request(...request);
    if (stream.session && !this.#guarded.has(stream.session)) {
      this.#guarded.add(stream.session);
      guardPings(stream.session);
    }
    return stream;
  }
}

/**
 * The library's timer may ping a session that was destroyed a moment ago; Node throws then, out of a timer, which ends
 * the process. Such a ping is nothing: the session's own events say that it is gone.
 */
function guardPings(session: Http2Session): void {
  const ping = session.ping.bind(session) as (...arguments_: unknown[]) => boolean;
  session.ping = (...given: unknown[]) => !session.closed && !session.destroyed && ping(...given);
}

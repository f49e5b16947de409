/** Services as objects whose methods throw typed errors and repeat what the contract says is harmless. */
import { setTimeout as delay } from "node:timers/promises";
import type {
  DescMethod,
  DescMethodBiDiStreaming,
  DescMethodServerStreaming,
  DescMethodStreaming,
  DescMethodUnary,
  DescService,
  MessageInitShape,
  MessageShape,
} from "@bufbuild/protobuf";
import { makeAnyClient, type Transport } from "@connectrpc/connect";
import type { Token } from "./address.js";
import { currentCorrelationId } from "./correlation.js";
import { mayRepeat, waitMs, type RetryPolicy } from "./retry.js";
import type { Sessions } from "./sessions.js";
import { typedError } from "./status.js";

/** Deadline of a unary call that names none. */
export const DEFAULT_TIMEOUT_MS = 10_000;

/** Options of one call. */
export interface CallOptions {
  /** Deadline of each attempt; unary calls default to 10 s, streams have none. Long polls need their wait on top. */
  timeoutMs?: number;
  /** Ends the call, whose promise then rejects with the signal's reason. */
  signal?: AbortSignal;
  /** In place of the client's policy. */
  retry?: RetryPolicy;
}

/** A service of the contract: unary rpcs return promises, streams are async iterables that cancel when left. */
export type ServiceClient<S extends DescService> = {
  [M in keyof S["method"]]: S["method"][M] extends DescMethodUnary<infer I, infer O>
    ? (request: MessageInitShape<I>, options?: CallOptions) => Promise<MessageShape<O>>
    : S["method"][M] extends DescMethodServerStreaming<infer I, infer O>
      ? (request: MessageInitShape<I>, options?: CallOptions) => AsyncGenerator<MessageShape<O>>
      : S["method"][M] extends DescMethodBiDiStreaming<infer I, infer O>
        ? (
            requests: AsyncIterable<MessageInitShape<I>>,
            options?: CallOptions,
          ) => AsyncGenerator<MessageShape<O>>
        : never;
};

/** What all calls of a client share. */
export interface CallSettings {
  token: Token;
  retry: RetryPolicy;
  sessions: Sessions;
}

/** Returns the client of `service` over `transport`. */
export function serviceClient<S extends DescService>(
  service: S,
  transport: Transport,
  settings: CallSettings,
): ServiceClient<S> {
  const methodOf = (method: DescMethod) => {
    if (method.methodKind === "unary") return unary(transport, method as DescMethodUnary, settings);
    return streaming(transport, method as DescMethodStreaming, settings);
  };
  return makeAnyClient(service, methodOf) as ServiceClient<S>;
}

async function headersOf({ token: given, sessions }: CallSettings, method: DescMethod): Promise<Headers> {
  const headers = new Headers();
  const session = sessions.of(method);
  if (session !== undefined) headers.set("astraflow-session", session);
  const token = typeof given === "string" ? given : await given();
  if (token) headers.set("authorization", `Bearer ${token}`);
  const correlationId = currentCorrelationId();
  if (correlationId !== undefined) headers.set("x-correlation-id", correlationId);
  return headers;
}

function unary(transport: Transport, method: DescMethodUnary, settings: CallSettings) {
  return async (request: MessageInitShape<typeof method.input>, options: CallOptions = {}) => {
    const { signal, timeoutMs = DEFAULT_TIMEOUT_MS, retry = settings.retry } = options;
    const startedMs = performance.now();
    for (let failed = 1; ; failed++) {
      try {
        const headers = await headersOf(settings, method);
        const answer = await transport.unary(method, signal, timeoutMs, headers, request);
        settings.sessions.opened(method, answer.message);
        return answer.message;
      } catch (thrown) {
        signal?.throwIfAborted();
        const error = typedError(thrown);
        const pauseMs = waitMs(retry, failed, error.retryAfterMs);
        const isInTime = performance.now() + pauseMs - startedMs <= retry.totalMs;
        if (!isInTime || !mayRepeat(method, error)) throw error;
        await delay(pauseMs, undefined, signal && { signal });
      }
    }
  };
}

function streaming(transport: Transport, method: DescMethodStreaming, settings: CallSettings) {
  return async function* (requests: unknown, { signal, timeoutMs }: CallOptions = {}) {
    const left = new AbortController();
    const ended = signal ? AbortSignal.any([signal, left.signal]) : left.signal;
    const input = method.methodKind === "server_streaming" ? only(requests) : requests;
    try {
      const answer = await transport.stream(
        method,
        ended,
        timeoutMs,
        await headersOf(settings, method),
        input as AsyncIterable<MessageInitShape<typeof method.input>>,
      );
      for await (const message of answer.message) yield message;
    } catch (thrown) {
      signal?.throwIfAborted();
      throw typedError(thrown);
    } finally {
      left.abort();
    }
  };
}

async function* only<Item>(item: Item): AsyncGenerator<Item> {
  yield item;
}

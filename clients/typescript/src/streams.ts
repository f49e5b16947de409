/** What the reconnecting streams share: requests that are written as they come, and coming back after a loss. */
import { setTimeout as delay } from "node:timers/promises";
import { InternalError, RetryableError, type AstraflowError } from "./errors.js";
import { RECONNECT, waitMs } from "./retry.js";

/** Requests of an open stream: an async iterable that ends when it is closed and all was read. */
export class Outbox<Item> implements AsyncIterable<Item> {
  readonly #waiting: Item[] = [];
  #isClosed = false;
  #wake: (() => void) | undefined;

  put(item: Item): void {
    this.#waiting.push(item);
    this.#wake?.();
  }

  close(): void {
    this.#isClosed = true;
    this.#wake?.();
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Item> {
    for (;;) {
      const item = this.#waiting.shift();
      if (item !== undefined) yield item;
      else if (this.#isClosed) return;
      else await new Promise<void>((resolve) => (this.#wake = resolve));
    }
  }
}

/** How a stream is followed. */
export interface FollowOptions {
  signal?: AbortSignal;
  /** Called with each loss of the stream, which is opened anew after a wait. */
  onLost?: (error: AstraflowError) => void;
}

/**
 * Yields what a server-streaming rpc sends, and opens it anew when it is lost or the server closes it.
 *
 * `open` is called with a signal to pass on: `follow((options) => client.admin.watch({}, options))`. A server that was
 * never reached, and one that refuses, throws; the signal ends the iteration without an error.
 */
export async function* follow<Item>(
  open: (options: { signal?: AbortSignal }) => AsyncIterable<Item>,
  { signal, onLost }: FollowOptions = {},
): AsyncGenerator<Item> {
  const options = signal ? { signal } : {};
  let failures = 0;
  let wasReached = false;
  while (!signal?.aborted) {
    let hintMs: number | undefined;
    try {
      for await (const item of open(options)) {
        wasReached = true;
        failures = 0;
        yield item;
      }
    } catch (error) {
      if (signal?.aborted) return;
      if (!wasReached || !mayComeBack(error)) throw error;
      failures++;
      hintMs = error.retryAfterMs;
      onLost?.(error);
    }
    await pause(failures, hintMs, signal);
  }
}

/** Whether a stream that failed so is opened anew: the server is away, or has a defect; it did not refuse. */
export function mayComeBack(error: unknown): error is AstraflowError {
  return error instanceof RetryableError || error instanceof InternalError;
}

/** Waits before a stream is opened anew; returns at once when `signal` is aborted. */
export async function pause(failures: number, hintMs?: number, signal?: AbortSignal): Promise<void> {
  await delay(waitMs(RECONNECT, Math.max(1, failures), hintMs), undefined, signal && { signal }).catch(
    () => undefined,
  );
}

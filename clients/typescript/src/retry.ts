/** When a call is repeated, and how long the client waits before it is. */
import { getOption, type DescMethod } from "@bufbuild/protobuf";
import { PayloadMissingError, UnavailableError, type AstraflowError } from "./errors.js";
import { retry as retryOption, Retry } from "./gen/astraflow/options/v1/options_pb.js";

/**
 * How often, and for how long, a harmless call is repeated while the server is unreachable.
 *
 * No attempt starts later than `totalMs` after the first one. Waits double from `firstWaitMs` up to `maxWaitMs`, each
 * shortened at random by up to half so that callers do not come back together. A wait that the server asks for takes
 * their place, lengthened at random by up to half.
 */
export interface RetryPolicy {
  totalMs: number;
  firstWaitMs: number;
  maxWaitMs: number;
}

export const DEFAULT_RETRY: RetryPolicy = { totalMs: 30_000, firstWaitMs: 50, maxWaitMs: 2_000 };
/** How streams come back: for as long as the server does not refuse them. */
export const RECONNECT: RetryPolicy = { totalMs: Infinity, firstWaitMs: 100, maxWaitMs: 2_000 };

/** Returns the wait after failed attempt number `attempt`, counted from 1; the server's hint wins. */
export function waitMs(policy: RetryPolicy, attempt: number, hintMs?: number): number {
  if (hintMs !== undefined) return Math.max(10, hintMs) * (1 + Math.random() / 2);
  // The exponent is bounded because those who reconnect for hours count their attempts too.
  const ceiling = Math.min(policy.maxWaitMs, policy.firstWaitMs * 2 ** Math.min(attempt - 1, 30));
  return ceiling * (0.5 + Math.random() / 2);
}

/** Whether the contract says that repeating the rpc is harmless, and the error that it may succeed. */
export function mayRepeat(method: DescMethod, error: AstraflowError): boolean {
  const declared = getOption(method, retryOption);
  const isHarmless = declared === Retry.READ || declared === Retry.IDEMPOTENT;
  return isHarmless && (error instanceof UnavailableError || error instanceof PayloadMissingError);
}

/**
 * The one error tree of AstraFlow, the same in every language (docs/contracts.md).
 *
 * Kinds are chosen by what the caller does next: call again (`RetryableError`), mend the request (`RequestError`), or
 * give up what it holds because someone else moved on (`StateError`). `reason` is a stable slug that travels as
 * `google.rpc.ErrorInfo.reason`; messages say what was wrong, its value, the limit and the remedy, for people.
 */

/** Facts that an error carries beside its message. */
export interface ErrorFacts {
  /** What the server says of it; `correlation_id` finds the call in the server's log. */
  metadata?: Readonly<Record<string, string>>;
  /** How long the server asks to wait before the next call. */
  retryAfterMs?: number | undefined;
  /** What it was made from. */
  cause?: unknown;
}

/** Base of every error that crosses a service boundary. */
export class AstraflowError extends Error {
  static readonly reason: string = "UNKNOWN";
  static readonly code: string = "UNKNOWN";
  readonly metadata: Readonly<Record<string, string>>;
  readonly retryAfterMs: number | undefined;

  constructor(message: string, facts: ErrorFacts = {}) {
    super(message, facts.cause === undefined ? undefined : { cause: facts.cause });
    this.name = new.target.name;
    this.metadata = { ...facts.metadata };
    this.retryAfterMs = facts.retryAfterMs;
  }

  /** Stable slug, for example `NOT_FOUND`. */
  get reason(): string {
    return (this.constructor as typeof AstraflowError).reason;
  }

  /** Name of the gRPC status that it travels with. */
  get code(): string {
    return (this.constructor as typeof AstraflowError).code;
  }
}

/** The same call may succeed later without any change. */
export class RetryableError extends AstraflowError {}

/** The service, or the store behind it, cannot answer now. */
export class UnavailableError extends RetryableError {
  static override readonly reason = "UNAVAILABLE";
  static override readonly code = "UNAVAILABLE";
}

/** No answer came within the call's deadline. */
export class DeadlineError extends RetryableError {
  static override readonly reason = "DEADLINE_EXCEEDED";
  static override readonly code = "DEADLINE_EXCEEDED";
}

/** A weight version that has not been announced to the server yet. */
export class UnknownVersionError extends RetryableError {
  static override readonly reason = "UNKNOWN_VERSION";
  static override readonly code = "UNAVAILABLE";
}

/** The payload that a commit refers to is gone: push the episode again. */
export class PayloadMissingError extends RetryableError {
  static override readonly reason = "PAYLOAD_MISSING";
  static override readonly code = "ABORTED";
}

/** A quota, a window or a memory watermark is reached. */
export class ResourceExhaustedError extends RetryableError {
  static override readonly reason = "RESOURCE_EXHAUSTED";
  static override readonly code = "RESOURCE_EXHAUSTED";
}

/** The request itself is wrong; sending it again will fail again. */
export class RequestError extends AstraflowError {}

/** A field is missing or out of its documented bound. */
export class InvalidArgumentError extends RequestError {
  static override readonly reason = "INVALID_ARGUMENT";
  static override readonly code = "INVALID_ARGUMENT";
}

/** A trajectory fails validation; it will never be trained on. */
export class InvalidTrajectoryError extends RequestError {
  static override readonly reason = "INVALID_TRAJECTORY";
  static override readonly code = "INVALID_ARGUMENT";
}

/** The recipe has an unknown key, a wrong type or an impossible combination. */
export class RecipeError extends RequestError {
  static override readonly reason = "INVALID_RECIPE";
  static override readonly code = "INVALID_ARGUMENT";
}

/** A plug-in cannot be found, does not satisfy its Protocol, or raised. */
export class PluginError extends RequestError {
  static override readonly reason = "PLUGIN_FAILED";
  static override readonly code = "FAILED_PRECONDITION";
}

/** No such run, policy, task, batch, node or version. */
export class NotFoundError extends RequestError {
  static override readonly reason = "NOT_FOUND";
  static override readonly code = "NOT_FOUND";
}

/** Both sides cannot prove who they are to each other; thrown by clients, before anything was sent. */
export class UntrustedServerError extends RequestError {
  static override readonly reason = "UNTRUSTED_SERVER";
  static override readonly code = "UNAVAILABLE";
}

/** The world moved on: drop what you hold and start from a fresh read. */
export class StateError extends AstraflowError {}

/** A newer trainer epoch, incarnation or attempt of the lease has taken over. */
export class FencedError extends StateError {
  static override readonly reason = "FENCED";
  static override readonly code = "FAILED_PRECONDITION";
}

/** A trainer holds the policy; metadata `holder` names it. */
export class PolicyHeldError extends StateError {
  static override readonly reason = "POLICY_HELD";
  static override readonly code = "FAILED_PRECONDITION";
}

/** The lease expired and was, or may be, handed to another node. */
export class LeaseLostError extends StateError {
  static override readonly reason = "LEASE_LOST";
  static override readonly code = "FAILED_PRECONDITION";
}

/** The same id already exists with other content. */
export class ConflictError extends StateError {
  static override readonly reason = "CONFLICT";
  static override readonly code = "ALREADY_EXISTS";
}

/** Versions before this one are not announced here; metadata `newest_version` names the newest (-1: none). */
export class VersionGapError extends StateError {
  static override readonly reason = "VERSION_GAP";
  static override readonly code = "FAILED_PRECONDITION";
}

/** The run, step or batch is not in a state that allows the call; read it again before deciding. */
export class PreconditionError extends StateError {
  static override readonly reason = "FAILED_PRECONDITION";
  static override readonly code = "FAILED_PRECONDITION";
}

/** Contract or schema versions differ between the two sides. */
export class IncompatibleError extends StateError {
  static override readonly reason = "INCOMPATIBLE";
  static override readonly code = "FAILED_PRECONDITION";
}

/** The token is missing, expired or unknown. */
export class UnauthenticatedError extends AstraflowError {
  static override readonly reason = "UNAUTHENTICATED";
  static override readonly code = "UNAUTHENTICATED";
}

/** The identity's role may not call this rpc. */
export class PermissionDeniedError extends AstraflowError {
  static override readonly reason = "PERMISSION_DENIED";
  static override readonly code = "PERMISSION_DENIED";
}

/** The contract names this capability, the server's release does not provide it. */
export class UnimplementedError extends AstraflowError {
  static override readonly reason = "UNIMPLEMENTED";
  static override readonly code = "UNIMPLEMENTED";
}

/** A defect on the serving side; its log holds the cause under the same correlation id. */
export class InternalError extends AstraflowError {
  static override readonly reason = "INTERNAL";
  static override readonly code = "INTERNAL";
}

type ErrorClass = typeof AstraflowError;

/** The class of each reason that travels. */
export const ERRORS_BY_REASON: ReadonlyMap<string, ErrorClass> = new Map(
  [
    AstraflowError,
    UnavailableError,
    DeadlineError,
    UnknownVersionError,
    PayloadMissingError,
    ResourceExhaustedError,
    InvalidArgumentError,
    InvalidTrajectoryError,
    RecipeError,
    PluginError,
    NotFoundError,
    UntrustedServerError,
    FencedError,
    PolicyHeldError,
    LeaseLostError,
    ConflictError,
    VersionGapError,
    PreconditionError,
    IncompatibleError,
    UnauthenticatedError,
    PermissionDeniedError,
    UnimplementedError,
    InternalError,
  ].map((kind: ErrorClass) => [kind.reason, kind]),
);

/**
 * Translation of failed calls into the error tree.
 *
 * A server's refusal carries `google.rpc.ErrorInfo` (domain `astraflow`, the reason, metadata) and, where the caller
 * should wait, `google.rpc.RetryInfo`. What carries none is classified by its status code; a connection that was lost
 * before an answer is `UnavailableError`, whatever the HTTP/2 layer calls it.
 */
import { Code, ConnectError } from "@connectrpc/connect";
import { durationMs } from "@bufbuild/protobuf/wkt";
import * as errors from "./errors.js";
import { ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";

const DOMAIN = "astraflow";
const BY_CODE = new Map<Code, typeof errors.AstraflowError>([
  [Code.Unavailable, errors.UnavailableError],
  [Code.DeadlineExceeded, errors.DeadlineError],
  [Code.ResourceExhausted, errors.ResourceExhaustedError],
  [Code.InvalidArgument, errors.InvalidArgumentError],
  [Code.NotFound, errors.NotFoundError],
  [Code.Unauthenticated, errors.UnauthenticatedError],
  [Code.PermissionDenied, errors.PermissionDeniedError],
  [Code.Unimplemented, errors.UnimplementedError],
]);
// Refusals of a message for its size, by gRPC servers and by Connect: it will not fit later either.
const TOO_LARGE = /larger than (max|configured)/;
// What Node says of certificates, and of a peer that speaks no TLS, or only TLS.
const UNTRUSTED =
  /CERT|SELF_SIGNED|UNABLE_TO_(GET_ISSUER|VERIFY)|ALTNAME|ERR_SSL|EPROTO|HPE_|wrong version number|alert/i;
const LOST_CONNECTION = /^(http\/2 |protocol error)/;

/** Returns the typed error for whatever a call threw. */
export function typedError(thrown: unknown): errors.AstraflowError {
  if (thrown instanceof errors.AstraflowError) return thrown;
  const failure = ConnectError.from(thrown);
  return fromDetails(failure) ?? fromCode(failure);
}

function fromDetails(failure: ConnectError): errors.AstraflowError | undefined {
  const info = failure.findDetails(ErrorInfoSchema)[0];
  if (info === undefined || info.domain !== DOMAIN) return undefined;
  const delay = failure.findDetails(RetryInfoSchema)[0]?.retryDelay;
  const kind = errors.ERRORS_BY_REASON.get(info.reason) ?? errors.InternalError;
  const retryAfterMs = delay === undefined ? undefined : durationMs(delay);
  return new kind(failure.rawMessage, { metadata: info.metadata, retryAfterMs, cause: failure });
}

function fromCode(failure: ConnectError): errors.AstraflowError {
  const name = Code[failure.code].replace(/(?<=[a-z])(?=[A-Z])/g, "_").toUpperCase();
  const facts = { cause: failure };
  const text = `${name}: ${failure.rawMessage || "the server gave no message"}`;
  if (failure.code === Code.ResourceExhausted && TOO_LARGE.test(failure.rawMessage)) {
    return new errors.InvalidArgumentError(
      `${text}; send less in one call: split it, or shorten the episode`,
      facts,
    );
  }
  if (failure.rawMessage.includes("cannot encode field"))
    return new errors.InvalidArgumentError(failure.rawMessage, facts);
  const untrusted = untrustedReason(failure);
  if (untrusted !== undefined) {
    return new errors.UntrustedServerError(
      `the server is not trusted: ${untrusted}; get the join string or the CA file of this server, and compare the clocks`,
      facts,
    );
  }
  if (wasLost(failure)) return new errors.UnavailableError(`UNAVAILABLE: ${failure.rawMessage}`, facts);
  return new (BY_CODE.get(failure.code) ?? errors.InternalError)(text, facts);
}

/** Whether the call ended without an answer of the server because the connection did. */
function wasLost(failure: ConnectError): boolean {
  if (failure.metadata.has("grpc-status")) return false;
  if (failure.code === Code.Aborted || failure.code === Code.Canceled) return true;
  return LOST_CONNECTION.test(failure.rawMessage) || isNodeError(failure.cause);
}

/** What Node says of a handshake that failed; undefined for anything else. */
function untrustedReason(failure: ConnectError): string | undefined {
  const { cause } = failure;
  if (!isNodeError(cause)) return undefined;
  return UNTRUSTED.test((cause as NodeJS.ErrnoException).code ?? "") ? (cause as Error).message : undefined;
}

function isNodeError(cause: unknown): boolean {
  return cause instanceof Error && "code" in cause && typeof cause.code === "string";
}

/**
 * Per-token columns: typed-array views over the little-endian bytes of a `Trajectory` message, and back.
 *
 * Decoding copies nothing where the bytes are aligned. Encoding checks lengths once, here, so that no message is made
 * whose columns disagree.
 */
import { create } from "@bufbuild/protobuf";
import { endianness } from "node:os";
import { InvalidTrajectoryError } from "./errors.js";
import { LogprobDtype, TrajectorySchema, type Trajectory } from "./gen/astraflow/rollout/v1/trajectory_pb.js";

/** Tokens [start, end) were sampled under one weight version. */
export interface Span {
  start: number;
  end: number;
  version: bigint;
}

/** The columns of one trajectory of T tokens. */
export interface Columns {
  tokenIds: Int32Array;
  /** T elements of 0 or 1; 1 where the token is trained on. */
  lossMask: Uint8Array;
  /** Natural log, at most 0; 0 where the mask is 0. */
  logprobs: Float32Array;
  /** Ascending; together they cover every masked position. */
  versionSpans: Span[];
}

/** The same as a caller has them. */
export interface ColumnsInit {
  tokenIds: ArrayLike<number>;
  lossMask: ArrayLike<number | boolean>;
  logprobs: ArrayLike<number>;
  versionSpans: readonly Span[];
}

/** Returns the message for `columns`. Throws InvalidTrajectoryError when lengths differ. */
export function encodeColumns(columns: ColumnsInit, trajectoryId: string): Trajectory {
  const { tokenIds, lossMask, logprobs, versionSpans } = columns;
  if (tokenIds.length === 0 || tokenIds.length !== lossMask.length || tokenIds.length !== logprobs.length) {
    throw mismatch(
      `columns of ${trajectoryId} must have one length ≥ 1, got ${tokenIds.length} token ids, ` +
        `${lossMask.length} of the loss mask and ${logprobs.length} log-probs`,
    );
  }
  return create(TrajectorySchema, {
    trajectoryId,
    tokenIds: littleEndian(Int32Array.from(tokenIds)),
    logprobDtype: LogprobDtype.F32,
    logprobs: littleEndian(Float32Array.from(logprobs)),
    lossMask: packMask(lossMask),
    versionSpans: [...versionSpans],
  });
}

/** Returns views over `message`. Throws InvalidTrajectoryError when the columns' lengths disagree. */
export function decodeColumns(message: Trajectory): Columns {
  const tokenBytes = aligned(message.tokenIds, 4, "token_ids", message.trajectoryId);
  const tokenIds = new Int32Array(tokenBytes.buffer, tokenBytes.byteOffset, tokenBytes.length / 4);
  const logprobs = decodeLogprobs(message);
  const numTokens = tokenIds.length;
  const maskBytes = Math.ceil(numTokens / 8);
  if (logprobs.length !== numTokens || message.lossMask.length !== maskBytes) {
    throw mismatch(
      `trajectory ${message.trajectoryId}: ${numTokens} token ids, ${logprobs.length} log-probs and ` +
        `${message.lossMask.length} mask bytes do not belong together; expected equal counts and ` +
        `${maskBytes} mask bytes`,
    );
  }
  const versionSpans = message.versionSpans.map(({ start, end, version }) => ({ start, end, version }));
  return { tokenIds, lossMask: unpackMask(message.lossMask, numTokens), logprobs, versionSpans };
}

/** Returns the log-prob column; bfloat16 is widened exactly. */
export function decodeLogprobs(message: Trajectory): Float32Array {
  const width = message.logprobDtype === LogprobDtype.BF16 ? 2 : 4;
  const bytes = aligned(message.logprobs, width, "logprobs", message.trajectoryId);
  if (width === 4) return new Float32Array(bytes.buffer, bytes.byteOffset, bytes.length / 4);
  const halves = new Uint16Array(bytes.buffer, bytes.byteOffset, bytes.length / 2);
  return new Float32Array(Uint32Array.from(halves, (half) => half * 65_536).buffer);
}

/** Returns ceil(T / 8) bytes, least significant bit first. */
export function packMask(mask: ArrayLike<number | boolean>): Uint8Array<ArrayBuffer> {
  const packed = new Uint8Array(Math.ceil(mask.length / 8));
  for (let token = 0; token < mask.length; token++) {
    if (mask[token]) packed[token >> 3]! |= 1 << (token & 7);
  }
  return packed;
}

/** Returns `numTokens` elements of 0 or 1. */
export function unpackMask(packed: Uint8Array, numTokens: number): Uint8Array {
  return Uint8Array.from({ length: numTokens }, (_, token) => ((packed[token >> 3] ?? 0) >> (token & 7)) & 1);
}

function mismatch(message: string): InvalidTrajectoryError {
  return new InvalidTrajectoryError(message, { metadata: { reason: "length_mismatch" } });
}

function littleEndian(column: Int32Array<ArrayBuffer> | Float32Array<ArrayBuffer>): Uint8Array<ArrayBuffer> {
  return inHostOrder(new Uint8Array(column.buffer), 4);
}

/** The bytes where a typed array of this width can lie, in this machine's order; copied only where they must be. */
function aligned(raw: Uint8Array, width: 2 | 4, name: string, trajectoryId: string): Uint8Array {
  if (raw.length % width !== 0) {
    throw mismatch(
      `trajectory ${trajectoryId}: ${name} holds ${raw.length} bytes, not a multiple of ${width}`,
    );
  }
  const bytes = raw.byteOffset % width === 0 && endianness() === "LE" ? raw : new Uint8Array(raw);
  return inHostOrder(bytes, width);
}

function inHostOrder<Bytes extends Uint8Array>(bytes: Bytes, width: 2 | 4): Bytes {
  if (endianness() === "LE") return bytes;
  const swapped = Buffer.from(bytes.buffer, bytes.byteOffset, bytes.length);
  if (width === 2) swapped.swap16();
  else swapped.swap32();
  return bytes;
}

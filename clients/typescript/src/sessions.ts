/** As whom a client speaks: the node that it joined last, and the trainer of its last claim. */
import { getOption, type DescMethod } from "@bufbuild/protobuf";
import { speaker as speakerOption, Speaker } from "./gen/astraflow/options/v1/options_pb.js";

const NODE = new Set([Speaker.NODE, Speaker.OPENS_NODE]);
const OPENING = new Set([Speaker.OPENS_NODE, Speaker.OPENS_TRAINER]);

/** Credentials that JoinRun and ClaimPolicy returned: each is sent with the calls in which its holder speaks. */
export class Sessions {
  readonly #known = new Map<string, string>();

  /** Takes a credential, `af1/node/…` or `af1/trainer/…`, for what is called from now on. */
  add(credential: string): void {
    const [, speaker] = credential.split("/");
    if (speaker !== undefined) this.#known.set(speaker, credential);
  }

  /** The credential to send with an rpc; undefined where nobody speaks, or nobody yet. */
  of(method: DescMethod): string | undefined {
    const declared = getOption(method, speakerOption);
    if (declared === Speaker.UNSPECIFIED) return undefined;
    return this.#known.get(NODE.has(declared) ? "node" : "trainer");
  }

  /** Keeps the credential of an answer that opened a session. */
  opened(method: DescMethod, answer: unknown): void {
    if (OPENING.has(getOption(method, speakerOption))) this.add((answer as { session: string }).session);
  }
}

/** The client of the dataflow server: its services over one connection, and whether both sides match. */
import { getOption } from "@bufbuild/protobuf";
import type { TrustOptions } from "./address.js";
import { IncompatibleError, InternalError } from "./errors.js";
import { AdminService } from "./gen/astraflow/dataflow/v1/admin_service_pb.js";
import { BatchService } from "./gen/astraflow/dataflow/v1/batch_service_pb.js";
import { EvaluationService } from "./gen/astraflow/dataflow/v1/evaluation_service_pb.js";
import { RunService } from "./gen/astraflow/dataflow/v1/run_service_pb.js";
import { SampleService } from "./gen/astraflow/dataflow/v1/sample_service_pb.js";
import { TaskService } from "./gen/astraflow/dataflow/v1/task_service_pb.js";
import { TrajectoryService } from "./gen/astraflow/dataflow/v1/trajectory_service_pb.js";
import { VersionService } from "./gen/astraflow/dataflow/v1/version_service_pb.js";
import { FollowingTransport, type TrustFiles } from "./following.js";
import { contract_version } from "./gen/astraflow/options/v1/options_pb.js";
import {
  file_astraflow_server_v1_server_info,
  type ServerInfo,
} from "./gen/astraflow/server/v1/server_info_pb.js";
import { DEFAULT_RETRY, type RetryPolicy } from "./retry.js";
import { Sessions } from "./sessions.js";
import { serviceClient, type CallOptions, type CallSettings, type ServiceClient } from "./service.js";

/** Release of this package. */
export const VERSION = "0.3.0";
/** Contract version that this package was made for. */
export const CONTRACT_VERSION: number = getOption(file_astraflow_server_v1_server_info, contract_version);
export { MAX_MESSAGE_BYTES } from "./following.js";

/** Options of a client. */
export interface ConnectOptions extends TrustOptions, TrustFiles {
  /** How harmless calls are repeated while the server is unreachable. */
  retry?: Partial<RetryPolicy>;
  /**
   * What JoinRun returned before a restart of the process (`WorkSession.credential`), so that the node is still itself.
   * A secret; keep it in a file that nobody else can read.
   */
  session?: string;
}

/**
 * The services of one dataflow server. Safe to share. `close` ends what is still running. It speaks as the node that it
 * joined last, and as the trainer of its last claim; `as` makes one for each of several.
 */
export class Client {
  readonly runs: ServiceClient<typeof RunService>;
  readonly tasks: ServiceClient<typeof TaskService>;
  readonly trajectories: ServiceClient<typeof TrajectoryService>;
  readonly batches: ServiceClient<typeof BatchService>;
  readonly versions: ServiceClient<typeof VersionService>;
  readonly evaluations: ServiceClient<typeof EvaluationService>;
  readonly samples: ServiceClient<typeof SampleService>;
  readonly admin: ServiceClient<typeof AdminService>;
  readonly #transport: FollowingTransport;
  readonly #settings: CallSettings;

  /**
   * Connects with the first call. Throws InvalidArgumentError for what is neither `HOST:PORT` nor a join string, and
   * for options and files that do not fit.
   */
  constructor(target: string | Client, { retry, session = "", ...trust }: ConnectOptions = {}) {
    const sessions = new Sessions();
    sessions.add(session);
    if (target instanceof Client) {
      this.#transport = target.#transport;
      this.#settings = { ...target.#settings, sessions };
    } else {
      const following = (this.#transport = new FollowingTransport(target, trust));
      const token = async () => {
        const { token } = following.endpoint;
        return typeof token === "string" ? token : token();
      };
      this.#settings = { token, retry: { ...DEFAULT_RETRY, ...retry }, sessions };
    }
    const [transport, settings] = [this.#transport, this.#settings];
    this.runs = serviceClient(RunService, transport, settings);
    this.tasks = serviceClient(TaskService, transport, settings);
    this.trajectories = serviceClient(TrajectoryService, transport, settings);
    this.batches = serviceClient(BatchService, transport, settings);
    this.versions = serviceClient(VersionService, transport, settings);
    this.evaluations = serviceClient(EvaluationService, transport, settings);
    this.samples = serviceClient(SampleService, transport, settings);
    this.admin = serviceClient(AdminService, transport, settings);
  }

  /** `HOST:PORT`, as files say it now. */
  get address(): string {
    return this.#transport.endpoint.address;
  }

  /** Asks the server who it is; needs no token. Throws IncompatibleError when this client cannot talk to it. */
  async serverInfo(options?: CallOptions): Promise<ServerInfo> {
    const { server } = await this.admin.getServerInfo({}, options);
    if (server === undefined)
      throw new InternalError(`the server at ${this.address} did not introduce itself`);
    requireCompatible(server, this.address);
    return server;
  }

  /** A client over the same connection that speaks as the holder of a credential of JoinRun or ClaimPolicy. */
  as(credential: string): Client {
    return new Client(this, { session: credential });
  }

  /** Closes the connection; calls in flight fail. */
  close(): void {
    this.#transport.close();
  }

  [Symbol.dispose](): void {
    this.close();
  }
}

/**
 * Returns a client of the server at `HOST:PORT`, of a join string, or of `joinFile` with an empty target; the connection
 * is made by the first call.
 */
export function connect(target: string, options?: ConnectOptions): Client {
  return new Client(target, options);
}

/** Calls a listing rpc until its last page. */
export async function* pages<Request extends object, Page extends { nextPageToken: string }>(
  list: (request: Request & { pageToken?: string }, options?: CallOptions) => Promise<Page>,
  request: Request,
  options?: CallOptions,
): AsyncGenerator<Page> {
  let pageToken: string | undefined;
  do {
    const page: Page = await list(pageToken === undefined ? request : { ...request, pageToken }, options);
    yield page;
    pageToken = page.nextPageToken;
  } while (pageToken !== "");
}

function requireCompatible(server: ServerInfo, address: string): void {
  const { oldestContractVersion: oldest, contractVersion: newest, productVersion } = server;
  if (oldest <= CONTRACT_VERSION && CONTRACT_VERSION <= newest) return;
  const spoken = oldest < newest ? `${oldest} to ${newest}` : `${newest}`;
  const older = oldest > CONTRACT_VERSION ? "client" : "server";
  throw new IncompatibleError(
    `the server at ${address} (astraflow ${productVersion}) speaks contract version ${spoken}, this client ` +
      `(@astraflow/client ${VERSION}) ${CONTRACT_VERSION}: update the ${older}`,
  );
}

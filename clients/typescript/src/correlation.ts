/** The correlation id of the calls made now: the server writes it on each log line of theirs. */
import { AsyncLocalStorage } from "node:async_hooks";
import { InvalidArgumentError } from "./errors.js";

const current = new AsyncLocalStorage<string>();

/**
 * Runs `work` and sends `correlationId` with every call made inside it, also in what it starts.
 *
 * @throws InvalidArgumentError unless the id has 1 to 64 printable ASCII characters.
 */
export function correlated<Result>(correlationId: string, work: () => Result): Result {
  if (!/^[ -~]{1,64}$/.test(correlationId)) {
    throw new InvalidArgumentError(
      `correlation id '${correlationId}' must have 1 to 64 printable ASCII characters`,
    );
  }
  return current.run(correlationId, work);
}

/** The id of the surrounding `correlated`, if there is one. */
export function currentCorrelationId(): string | undefined {
  return current.getStore();
}

/** What a user writes to say which server is meant: the one place that reads it. */
import { InvalidArgumentError } from "./errors.js";

/**
 * Returns the base URL of `HOST:PORT`, with IPv6 hosts in brackets.
 *
 * @throws InvalidArgumentError for anything else.
 */
export function baseUrlOf(address: string): string {
  const parts = /^(?<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?<port>\d{1,5})$/.exec(address);
  const port = Number(parts?.groups?.["port"]);
  if (parts === null || port < 1 || port > 65_535) {
    throw new InvalidArgumentError(
      `address '${address}' must be HOST:PORT with a port of 1–65535: 127.0.0.1:7070, [::1]:7070`,
    );
  }
  return `http://${address}`;
}

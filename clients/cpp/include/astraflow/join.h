// The join string: one line that says where a server is, how it proves who it is, and as whom to call it.
#pragma once

#include <string>
#include <vector>

namespace astraflow {

// What a join string says. `token` is a secret, and so is the string that holds it.
struct Join {
  std::string address;          // HOST:PORT
  std::vector<std::string> ca;  // certificates, in DER, of the authorities that the server's may come from
  bool public_ca = false;       // it comes from an authority that this machine trusts anyway
  std::string server_name;      // that the certificate must carry; empty takes the host of the address
  std::string token;

  // The authorities in PEM.
  std::string ca_pem() const;
};

// Whether this is meant as a join string rather than as an address.
bool is_join(const std::string& text);

// Reads a join string; white space around it is ignored, and so are keys that a newer release may add. Throws
// RequestError (INVALID_ARGUMENT), whose text never repeats the content.
Join parse_join(const std::string& text);

// Throws RequestError unless this is HOST:PORT, with IPv6 hosts in brackets.
void require_address(const std::string& address);

// Whether only this machine can reach the host of an address.
bool is_loopback(const std::string& address);

}  // namespace astraflow

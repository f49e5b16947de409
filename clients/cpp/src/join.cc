#include "astraflow/join.h"

#include <algorithm>
#include <optional>
#include <regex>

#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>

#include "astraflow/errors.h"

namespace astraflow {
namespace {

constexpr char kPrefix[] = "af1.";
constexpr size_t kMaxChars = 65'536;
constexpr char kBase64[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";

[[noreturn]] void refuse(const std::string& problem) {
  raise(Error("INVALID_ARGUMENT", problem + "; ask the server's operator for a new one (`astraflow join-token`)"));
}

// Decodes base64 whose last two letters are `last`; padding may be there.
std::optional<std::string> decoded(std::string text, const std::string& last) {
  static const std::string common = kBase64;
  const std::string alphabet = common + last;
  text.erase(text.find_last_not_of('=') + 1);
  if (text.size() % 4 == 1) return std::nullopt;
  std::string bytes;
  unsigned bits = 0;
  int num_bits = 0;
  for (char letter : text) {
    const size_t value = alphabet.find(letter);
    if (value == std::string::npos) return std::nullopt;
    bits = bits << 6 | static_cast<unsigned>(value);
    num_bits += 6;
    if (num_bits >= 8) {
      num_bits -= 8;
      bytes.push_back(static_cast<char>(bits >> num_bits & 0xff));
    }
  }
  return bytes;
}

std::string encoded(const std::string& bytes) {
  static const std::string alphabet = std::string(kBase64) + "+/";
  std::string text;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    unsigned bits = 0;
    for (size_t k = 0; k < 3; ++k) bits = bits << 8 | (i + k < bytes.size() ? static_cast<unsigned char>(bytes[i + k]) : 0);
    for (size_t k = 0; k < 4; ++k) text.push_back(i + k <= bytes.size() ? alphabet[bits >> (18 - 6 * k) & 63] : '=');
  }
  return text;
}

using Content = google::protobuf::Map<std::string, google::protobuf::Value>;

std::string text_of(const Content& content, const std::string& key) {
  const auto found = content.find(key);
  if (found == content.end()) return "";
  const std::string& text = found->second.string_value();
  // A token is sent as a header, and a name is looked up: neither can hold anything else.
  const bool is_plain = std::all_of(text.begin(), text.end(), [](char c) { return '!' <= c && c <= '~'; });
  if (!found->second.has_string_value() || !is_plain) {
    refuse(key + " of the join string must be printable ASCII without spaces");
  }
  return text;
}

std::vector<std::string> certificates_of(const Content& content) {
  std::vector<std::string> found;
  const auto given = content.find("ca");
  if (given == content.end()) return found;
  bool is_good = given->second.has_list_value();
  for (const auto& each : given->second.list_value().values()) {
    const auto der = each.has_string_value() ? decoded(each.string_value(), "+/") : std::nullopt;
    // Every certificate is a DER sequence of two length bytes at least.
    is_good = is_good && der && der->size() > 4 && (*der)[0] == '\x30';
    if (is_good) found.push_back(*der);
  }
  if (!is_good) refuse("ca of the join string must be a list of base64 DER certificates");
  return found;
}

std::string trimmed(const std::string& text) {
  const char* space = " \t\r\n\v\f";
  const size_t first = text.find_first_not_of(space);
  return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(space) - first + 1);
}

}  // namespace

std::string Join::ca_pem() const {
  std::string pem;
  for (const std::string& der : ca) {
    const std::string text = encoded(der);
    pem += "-----BEGIN CERTIFICATE-----\n";
    for (size_t i = 0; i < text.size(); i += 64) pem += text.substr(i, 64) + "\n";
    pem += "-----END CERTIFICATE-----\n";
  }
  return pem;
}

bool is_join(const std::string& text) { return trimmed(text).rfind(kPrefix, 0) == 0; }

Join parse_join(const std::string& given) {
  const std::string text = trimmed(given);
  if (!is_join(text)) refuse("a join string begins with 'af1.'");
  if (text.size() > kMaxChars) {
    refuse("the join string has " + std::to_string(text.size()) + " characters, at most " + std::to_string(kMaxChars));
  }
  const auto json = decoded(text.substr(sizeof kPrefix - 1), "-_");
  google::protobuf::Value value;
  if (!json || !google::protobuf::util::JsonStringToMessage(*json, &value).ok()) {
    refuse("the join string is damaged or was cut short");
  }
  if (!value.has_struct_value()) refuse("the join string holds no JSON object");
  const Content& content = value.struct_value().fields();
  Join join;
  join.address = text_of(content, "address");
  join.ca = certificates_of(content);
  if (const auto found = content.find("public_ca"); found != content.end()) {
    if (!found->second.has_bool_value()) refuse("public_ca of the join string must be true or false");
    join.public_ca = found->second.bool_value();
  }
  join.server_name = text_of(content, "server_name");
  join.token = text_of(content, "token");
  require_address(join.address);
  if (join.ca.empty() != join.public_ca) {
    refuse(std::string("the join string names ") + (join.public_ca ? "both" : "neither") +
           (join.public_ca ? " ca and public_ca" : " ca nor public_ca") + ": exactly one says whom to trust");
  }
  return join;
}

void require_address(const std::string& address) {
  static const std::regex form(R"((\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5}))");
  std::smatch parts;
  const bool fits = std::regex_match(address, parts, form);
  if (!fits || std::stoi(parts[2]) < 1 || std::stoi(parts[2]) > 65'535) {
    raise(Error("INVALID_ARGUMENT", "address '" + address +
                                        "' must be HOST:PORT with a port of 1-65535: 127.0.0.1:7070, [::1]:7070"));
  }
}

bool is_loopback(const std::string& address) {
  static const std::regex form(R"((localhost|127(\.[0-9]{1,3}){3}|\[::1\]):[0-9]+)");
  return std::regex_match(address, form);
}

}  // namespace astraflow

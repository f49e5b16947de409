// What the conformance suite does not see: join strings by the table of all languages, views, and whom a client trusts.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>

#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>

#include "astraflow/client.h"
#include "astraflow/columns.h"
#include "astraflow/join.h"

namespace {

using google::protobuf::Struct;

void check(bool is_so, const std::string& what) {
  if (is_so) return;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  std::exit(1);
}

template <class Do>
std::string refused(Do act) {
  try {
    act();
  } catch (const astraflow::RequestError& error) {
    check(error.reason() == "INVALID_ARGUMENT", error.reason());
    return error.what();
  }
  return "";
}

Struct table_at(const char* path) {
  std::ifstream file(path);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  Struct table;
  check(google::protobuf::util::JsonStringToMessage(text, &table).ok(), std::string("no table at ") + path);
  return table;
}

void join_strings_are_read_as_in_every_language(const char* path) {
  const Struct table = table_at(path);
  const auto& good = table.fields().at("good").list_value().values();
  for (const auto& each : good) {
    const auto& row = each.struct_value().fields();
    const auto& content = row.at("content").struct_value().fields();
    const astraflow::Join join = astraflow::parse_join(row.at("text").string_value());
    const bool is_same = join.address == content.at("address").string_value() &&
                         join.token == content.at("token").string_value() &&
                         join.server_name == content.at("server_name").string_value() &&
                         join.public_ca == content.at("public_ca").bool_value() &&
                         static_cast<int>(join.ca.size()) == content.at("ca").list_value().values_size();
    check(is_same, row.at("case").string_value());
    for (size_t i = 0; i < join.ca.size(); ++i) {
      const std::string text = content.at("ca").list_value().values(static_cast<int>(i)).string_value();
      check(join.ca_pem().find("\n" + text + "\n") != std::string::npos, "certificates of " + row.at("case").string_value());
    }
  }
  const auto& bad = table.fields().at("bad").list_value().values();
  for (const auto& each : bad) {
    const auto& row = each.struct_value().fields();
    const std::string message = refused([&] { astraflow::parse_join(row.at("text").string_value()); });
    check(message.find(row.at("says").string_value()) != std::string::npos,
          row.at("case").string_value() + ": '" + message + "' does not say " + row.at("says").string_value());
  }
  check(!good.empty() && !bad.empty(), "the table is empty");
}

void a_token_does_not_travel_in_the_clear() {
  astraflow::ConnectOptions options;
  options.token = "s3cret";
  const std::string message = refused([&] { astraflow::Client("central.example:7070", options); });
  check(!message.empty() && message.find("s3cret") == std::string::npos, "refused without showing the token");
  for (const char* target : {"127.0.0.1:7070", "[::1]:7070", "localhost:7070"}) {
    check(refused([&] { astraflow::Client(target, options); }).empty(), target);
  }
  options.insecure = true;
  check(refused([&] { astraflow::Client("central.example:7070", options); }).empty(), "insecure");
}

void columns_are_views_of_their_message() {
  const auto message = astraflow::encode_columns({{1, 2, 3}, {false, true, true}, {0, -0.5F, -1}, {}}, "t");
  astraflow::require_columns(message);
  const auto tokens = astraflow::token_ids(message);
  check(reinterpret_cast<const char*>(tokens.data()) == message.token_ids().data(), "the token ids were copied");
  check(tokens.size() == 3 && tokens[2] == 3 && astraflow::logprobs(message)[1] == -0.5F, "columns");
}

}  // namespace

int main(int, char** arguments) {
  join_strings_are_read_as_in_every_language(arguments[1]);
  a_token_does_not_travel_in_the_clear();
  columns_are_views_of_their_message();
}

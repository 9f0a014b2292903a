// For the Python test: JSON lines {"template": text, "context": object} on stdin; for each one a line
// {"out": text} or {"error": text} on stdout. `now` in a line is the time of strftime_now, in seconds (UTC).
#include <ctime>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "text/chat_template.h"

int main() {
  using nlohmann::ordered_json;
  for (std::string line; std::getline(std::cin, line);) {
    const ordered_json task = ordered_json::parse(line);
    const std::time_t seconds = task.value("now", std::time_t{0});
    std::tm now{};
    gmtime_r(&seconds, &now);
    ordered_json answer;
    const auto parsed = nibble::ChatTemplate::parse(task["template"].get<std::string>(), "template");
    if (!parsed.ok()) {
      answer["error"] = parsed.status().message();
    } else if (const auto out = parsed->render(task["context"], &now); out.ok()) {
      answer["out"] = *out;
    } else {
      answer["error"] = out.status().message();
    }
    std::cout << answer.dump() << "\n";
  }
  return 0;
}

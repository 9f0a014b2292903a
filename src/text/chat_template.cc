#include "text/chat_template.h"

#include <new>
#include <nlohmann/json.hpp>

#include "text/jinja_parser.h"
#include "text/jinja_render.h"
#include "text/jinja_unicode.h"

namespace nibble {

struct ChatTemplate::Impl {
  std::string name;
  TemplateLimits limits;
  std::unique_ptr<const jinja::Ast> ast;
};

ChatTemplate::ChatTemplate(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ChatTemplate::ChatTemplate(ChatTemplate&&) noexcept = default;
ChatTemplate& ChatTemplate::operator=(ChatTemplate&&) noexcept = default;
ChatTemplate::~ChatTemplate() = default;

Result<ChatTemplate> ChatTemplate::parse(
    std::string source,  // NOLINT(performance-unnecessary-value-param): the interface
    const std::string& name, const TemplateLimits& limits) {
  if (static_cast<int64_t>(source.size()) > limits.max_source_bytes) {
    return user_error("{}: the template has {} bytes, the limit is {}", name, source.size(),
                      limits.max_source_bytes);
  }
  if (!jinja::is_valid_utf8(source)) return user_error("{}: the template is not UTF-8", name);
  auto impl = std::make_unique<Impl>();
  impl->name = name;
  impl->limits = limits;
  try {
    impl->ast = jinja::parse_template(source, limits);
  } catch (const jinja::Error& error) {
    return user_error("{}:{}: {}", name, error.line, error.message);
  } catch (const std::bad_alloc&) {
    return internal_error("{}: out of memory while the template is parsed", name);
  }
  return ChatTemplate(std::move(impl));
}

Result<std::string> ChatTemplate::render(const nlohmann::ordered_json& context, const std::tm* now) const {
  jinja::Renderer renderer(*impl_->ast, impl_->limits, now);
  try {
    return renderer.render(context);
  } catch (const jinja::Error& error) {
    return user_error("{}:{}: {}", impl_->name, renderer.line(), error.message);
  } catch (const std::bad_alloc&) {
    return internal_error("{}: out of memory while the template is rendered", impl_->name);
  }
}

}  // namespace nibble

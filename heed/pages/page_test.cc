// Tests of pages: escaping, base64, templates whose slots cannot be forged.
#include "heed/pages/page.h"

#include <span>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "heed/core/error.h"

namespace heed::pages {
namespace {

using testing::HasSubstr;
using testing::Not;

std::string Base64Of(std::string_view text) {
  return Base64({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
}

TEST(PageTest, Base64OfTheExamplesOfRfc4648) {  // RFC 4648, section 10
  EXPECT_EQ(Base64Of(""), "");
  EXPECT_EQ(Base64Of("f"), "Zg==");
  EXPECT_EQ(Base64Of("fo"), "Zm8=");
  EXPECT_EQ(Base64Of("foo"), "Zm9v");
  EXPECT_EQ(Base64Of("foobar"), "Zm9vYmFy");
  EXPECT_EQ(Base64Of("\xFB\xFF\xBF"), "+/+/");
}

TEST(PageTest, JsonInAScriptEndsNoScript) {
  const Json json = {{"</script>", "<!-- & \xE2\x80\xA8 \xFF \xF0\x9F\x98\x80"}};
  const std::string text = InertJson(json);
  EXPECT_EQ(text,
            "{\"\\u003c/script\\u003e\":\"\\u003c!-- \\u0026 \\u2028 \\ufffd "
            "\\ud83d\\ude00\"}");
  EXPECT_EQ(Json::parse(text)["</script>"], "<!-- & \xE2\x80\xA8 \xEF\xBF\xBD \xF0\x9F\x98\x80");
}

TEST(PageTest, TextInHtmlIsText) {
  EXPECT_EQ(EscapeHtml("<b a='1' c=\"2\">&amp;"), "&lt;b a=&#39;1&#39; c=&quot;2&quot;&gt;&amp;amp;");
  EXPECT_EQ(EscapeHtml(std::string("a\0b\xFF", 4)),
            "a\xEF\xBF\xBD"
            "b\xEF\xBF\xBD");
}

Page Example() {
  Page page;
  page.name = "compare.html";
  page.styles = {"base.css"};
  page.scripts = {"base.js"};
  page.title = "@BODY@<@SCRIPT@";
  page.body = "<p>@DATA@@TITLE@</p>";
  page.data = {{"x", "@STYLE@"}};
  page.blobs = {{"q0", "AAAA"}};
  return page;
}

TEST(PageTest, WhatFillsASlotIsNotSearchedForSlots) {
  const std::string html = ComposePage(Example());
  EXPECT_THAT(html, HasSubstr("<p>@DATA@@TITLE@</p>"));
  EXPECT_THAT(html, HasSubstr("@BODY@&lt;@SCRIPT@</title>"));
  EXPECT_THAT(html, HasSubstr("{\"x\":\"@STYLE@\"}</script>"));
  EXPECT_THAT(html, HasSubstr("id=\"q0\">AAAA</script>"));
  EXPECT_THAT(html, Not(HasSubstr("@POLICY@")));
}

TEST(PageTest, AStyleRuleIsNotASlot) {  // '@media' is unchanged
  Page page = Example();
  page.styles = {"base.css", "view.css"};
  EXPECT_THAT(ComposePage(page), HasSubstr("@media (max-width"));
}

TEST(PageTest, AMissingFileIsOurFault) {
  Page page = Example();
  page.scripts.push_back("nothing.js");
  EXPECT_THROW(ComposePage(page), InternalError);
}

}  // namespace
}  // namespace heed::pages

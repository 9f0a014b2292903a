#include "text/chat_template.h"

#include <gtest/gtest.h>

TEST(ChatTemplate, Empty) { EXPECT_TRUE(nibble::ChatTemplate::parse("", "t").ok()); }

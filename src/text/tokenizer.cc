#include "text/tokenizer.h"

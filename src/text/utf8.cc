#include "text/utf8.h"

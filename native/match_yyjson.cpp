// yyjson, compiled with the matcher's own flags: only its reader and the writer of single values are used.
#define YYJSON_DISABLE_UTILS 1
#define YYJSON_DISABLE_INCR_READER 1
#include "vendor/yyjson/yyjson.c"

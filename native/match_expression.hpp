// Expressions over attributes, as programs for a small stack machine: the values of computed paths.
//
//   path        'C' u32 trigger, u32 inputs, each: text (an encoded path 'E' 'N' name), then the code
//   code        instructions, one byte each, with operands as below; exactly one value is left
//
//    1 integer  i32            10 to boolean             19 -   20 *   21 /   22 %
//    2 text     u32, bytes     11 xor                    23 like   u8 negated, u32 length, LikeCode
//    3 boolean  u8             12 =   13 !=              24 in     u8 negated, u32 target
//    4 attribute u8 input      14 <   15 <=              25 in end u8 negated
//    5 exists   u8 input       16 >   17 >=              26 call   u8 function, u16 arguments
//    6 not      7 negative     18 +                      27 fail
//    8 and      u32 target: a false value stays and the program goes on there; else it is dropped
//    9 or       u32 target: likewise for a true value
//
// A CESQL error never becomes a value again, so the first one ends the program: the path is missing.
// Targets are positions in the code, always ahead. `trigger` is an input without which there is no value,
// or ~0.
#pragma once

#include "match_memory.hpp"

namespace virta {

constexpr uint32_t kExpressionStackMax = 1024, kExpressionInputsMax = 255;
constexpr uint32_t kTextCharsMax = 1 << 20;  // as virta.filters.cesql.functions

struct Expression {
    List<uint32_t> inputs;  // nodes; each is counted
    List<String> names;     // of the attributes
    String code;
    uint32_t depth = 0;    // of the stack
    uint32_t trigger = 0;  // node, 0 for none
};

// The stack an expression needs, 0 if the code is bad.
uint32_t check_expression(const char* code, size_t length, size_t inputs);

}  // namespace virta

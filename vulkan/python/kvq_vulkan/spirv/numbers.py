"""Numbers of the SPIR-V specification and of its extended instruction set GLSL.std.450: those in use."""

from __future__ import annotations

from enum import IntEnum

MAGIC = 0x07230203
#: SPIR-V 1.5, what Vulkan 1.2 takes.
VERSION = 0x00010500


class Op(IntEnum):
    """Opcodes."""

    EXT_INST_IMPORT = 11
    EXT_INST = 12
    MEMORY_MODEL = 14
    ENTRY_POINT = 15
    EXECUTION_MODE = 16
    CAPABILITY = 17
    TYPE_VOID = 19
    TYPE_BOOL = 20
    TYPE_INT = 21
    TYPE_FLOAT = 22
    TYPE_VECTOR = 23
    TYPE_ARRAY = 28
    TYPE_RUNTIME_ARRAY = 29
    TYPE_STRUCT = 30
    TYPE_POINTER = 32
    TYPE_FUNCTION = 33
    CONSTANT_TRUE = 41
    CONSTANT_FALSE = 42
    CONSTANT = 43
    FUNCTION = 54
    FUNCTION_END = 56
    VARIABLE = 59
    LOAD = 61
    STORE = 62
    ACCESS_CHAIN = 65
    DECORATE = 71
    MEMBER_DECORATE = 72
    COMPOSITE_EXTRACT = 81
    CONVERT_F_TO_U = 109
    CONVERT_F_TO_S = 110
    CONVERT_S_TO_F = 111
    CONVERT_U_TO_F = 112
    U_CONVERT = 113
    S_CONVERT = 114
    F_CONVERT = 115
    BITCAST = 124
    F_NEGATE = 127
    I_ADD = 128
    F_ADD = 129
    I_SUB = 130
    F_SUB = 131
    I_MUL = 132
    F_MUL = 133
    U_DIV = 134
    S_DIV = 135
    F_DIV = 136
    U_MOD = 137
    IS_NAN = 156
    LOGICAL_EQUAL = 164
    LOGICAL_NOT_EQUAL = 165
    LOGICAL_OR = 166
    LOGICAL_AND = 167
    LOGICAL_NOT = 168
    SELECT = 169
    I_EQUAL = 170
    I_NOT_EQUAL = 171
    U_GREATER_THAN = 172
    S_GREATER_THAN = 173
    U_GREATER_THAN_EQUAL = 174
    S_GREATER_THAN_EQUAL = 175
    U_LESS_THAN = 176
    S_LESS_THAN = 177
    U_LESS_THAN_EQUAL = 178
    S_LESS_THAN_EQUAL = 179
    F_ORD_EQUAL = 180
    F_UNORD_NOT_EQUAL = 183
    F_ORD_LESS_THAN = 184
    F_ORD_GREATER_THAN = 186
    F_ORD_LESS_THAN_EQUAL = 188
    F_ORD_GREATER_THAN_EQUAL = 190
    SHIFT_RIGHT_LOGICAL = 194
    SHIFT_RIGHT_ARITHMETIC = 195
    SHIFT_LEFT_LOGICAL = 196
    BITWISE_OR = 197
    BITWISE_XOR = 198
    BITWISE_AND = 199
    NOT = 200
    BIT_COUNT = 205
    CONTROL_BARRIER = 224
    PHI = 245
    LOOP_MERGE = 246
    SELECTION_MERGE = 247
    LABEL = 248
    BRANCH = 249
    BRANCH_CONDITIONAL = 250
    RETURN = 253
    GROUP_NON_UNIFORM_SHUFFLE = 345
    GROUP_NON_UNIFORM_SHUFFLE_XOR = 346
    GROUP_NON_UNIFORM_SHUFFLE_UP = 347
    GROUP_NON_UNIFORM_SHUFFLE_DOWN = 348


class Capability(IntEnum):
    """What a device must be able to do."""

    SHADER = 1
    FLOAT16 = 9
    INT16 = 22
    INT8 = 39
    GROUP_NON_UNIFORM = 61
    GROUP_NON_UNIFORM_SHUFFLE = 65
    GROUP_NON_UNIFORM_SHUFFLE_RELATIVE = 66
    STORAGE_BUFFER_16BIT_ACCESS = 4433
    STORAGE_BUFFER_8BIT_ACCESS = 4448
    DENORM_PRESERVE = 4464
    SIGNED_ZERO_INF_NAN_PRESERVE = 4466
    ROUNDING_MODE_RTE = 4467


class ExecutionMode(IntEnum):
    """Properties of an entry point."""

    LOCAL_SIZE = 17
    DENORM_PRESERVE = 4459
    SIGNED_ZERO_INF_NAN_PRESERVE = 4461
    ROUNDING_MODE_RTE = 4462


class Decoration(IntEnum):
    """Properties of types and variables."""

    BLOCK = 2
    ARRAY_STRIDE = 6
    BUILT_IN = 11
    RESTRICT = 19
    ALIASED = 20
    NON_WRITABLE = 24
    BINDING = 33
    DESCRIPTOR_SET = 34
    OFFSET = 35


class BuiltIn(IntEnum):
    """Variables that the device fills."""

    WORKGROUP_ID = 26
    LOCAL_INVOCATION_ID = 27


class StorageClass(IntEnum):
    """Where a variable lives."""

    INPUT = 1
    WORKGROUP = 4
    FUNCTION = 7
    PUSH_CONSTANT = 9
    STORAGE_BUFFER = 12


class Scope(IntEnum):
    """Who takes part in an instruction."""

    WORKGROUP = 2
    SUBGROUP = 3


#: Memory semantics of a workgroup's barrier: acquire and release, of workgroup memory.
BARRIER_SEMANTICS = 0x8 | 0x100


class Glsl(IntEnum):
    """Instructions of GLSL.std.450."""

    ROUND = 1
    ROUND_EVEN = 2
    TRUNC = 3
    F_ABS = 4
    FLOOR = 8
    CEIL = 9
    SIN = 13
    COS = 14
    TAN = 15
    ATAN = 18
    SINH = 19
    COSH = 20
    TANH = 21
    POW = 26
    EXP = 27
    LOG = 28
    EXP2 = 29
    LOG2 = 30
    SQRT = 31
    INVERSE_SQRT = 32
    U_MIN = 38
    S_MIN = 39
    U_MAX = 41
    S_MAX = 42
    FMA = 50
    FIND_U_MSB = 75
    N_MIN = 79
    N_MAX = 80

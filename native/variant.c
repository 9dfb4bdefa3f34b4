/* JSON values as Spark's VARIANT binary; virta/spark/source/variant.py has the layout.
 *
 * Children are written first, then moved up to leave space for their header, whose widths depend on them.
 * Text with lone surrogates and values over the limit raise, and the plain engine handles them. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define VARIANT_BYTES_MAX (16 * 1024 * 1024 - 1)
#define SHORT_TEXT_BYTES_MAX 63

enum basic { PRIMITIVE, SHORT_TEXT, OBJECT, ARRAY };
enum kind {
    K_NULL = 0, K_TRUE = 1, K_FALSE = 2, K_INT1 = 3, K_INT2 = 4,
    K_INT4 = 5, K_INT8 = 6, K_DOUBLE = 7, K_TEXT = 16,
};

typedef struct { uint8_t *data; size_t size, capacity; PyObject *keys; } Out;
typedef struct { PyObject *key; uint32_t id, offset; PyObject *value; } Member;

static int reserve(Out *out, size_t more)
{
    if (out->size + more <= out->capacity) return 0;
    if (out->size + more > VARIANT_BYTES_MAX) {
        PyErr_SetString(PyExc_OverflowError, "the variant is over its limit");
        return -1;
    }
    size_t space = (out->size + more) * 2;
    uint8_t *data = PyMem_Realloc(out->data, space);
    if (!data) { PyErr_NoMemory(); return -1; }
    out->data = data;
    out->capacity = space;
    return 0;
}

static inline void put_number(uint8_t *p, uint64_t number, int width)
{
    for (int i = 0; i < width; i++) p[i] = (uint8_t)(number >> (8 * i));
}

static inline int width_of(size_t number) { return number <= 0xFF ? 1 : number <= 0xFFFF ? 2 : 3; }

static int put_primitive(Out *out, enum kind kind, const void *data, size_t size)
{
    if (reserve(out, 1 + size) < 0) return -1;
    out->data[out->size++] = (uint8_t)(kind << 2 | PRIMITIVE);
    memcpy(out->data + out->size, data, size);
    out->size += size;
    return 0;
}

static int put_text(Out *out, PyObject *text)
{
    Py_ssize_t size;
    const char *utf8 = PyUnicode_AsUTF8AndSize(text, &size);
    if (!utf8) return -1;
    if (reserve(out, 5 + (size_t)size) < 0) return -1;
    if (size <= SHORT_TEXT_BYTES_MAX) {
        out->data[out->size++] = (uint8_t)(size << 2 | SHORT_TEXT);
    } else {
        out->data[out->size++] = K_TEXT << 2 | PRIMITIVE;
        put_number(out->data + out->size, (uint64_t)size, 4);
        out->size += 4;
    }
    memcpy(out->data + out->size, utf8, (size_t)size);
    out->size += (size_t)size;
    return 0;
}

static int put_integer(Out *out, PyObject *value)
{
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (number == -1 && PyErr_Occurred()) return -1;
    if (overflow) {
        double real = PyLong_AsDouble(value);
        if (real == -1.0 && PyErr_Occurred()) {
            PyErr_Clear();
            real = overflow > 0 ? Py_HUGE_VAL : -Py_HUGE_VAL;
        }
        return put_primitive(out, K_DOUBLE, &real, 8);
    }
    if (number >= INT8_MIN && number <= INT8_MAX) return put_primitive(out, K_INT1, &number, 1);
    if (number >= INT16_MIN && number <= INT16_MAX) return put_primitive(out, K_INT2, &number, 2);
    if (number >= INT32_MIN && number <= INT32_MAX) return put_primitive(out, K_INT4, &number, 4);
    return put_primitive(out, K_INT8, &number, 8);
}

static int put_value(Out *out, PyObject *value);

/* Move what was written from `start` up by `space` bytes and return where the header goes. */
static uint8_t *insert_space(Out *out, size_t start, size_t space)
{
    if (reserve(out, space) < 0) return NULL;
    memmove(out->data + start + space, out->data + start, out->size - start);
    out->size += space;
    return out->data + start;
}

static int put_array(Out *out, PyObject *list)
{
    Py_ssize_t count = PyList_GET_SIZE(list);
    size_t start = out->size;
    uint32_t *offsets = PyMem_Malloc(sizeof(uint32_t) * (size_t)(count + 1));
    int rc = -1;
    if (!offsets) { PyErr_NoMemory(); return -1; }
    for (Py_ssize_t i = 0; i < count; i++) {
        offsets[i] = (uint32_t)(out->size - start);
        if (put_value(out, PyList_GET_ITEM(list, i)) < 0) goto done;
    }
    offsets[count] = (uint32_t)(out->size - start);
    int width = width_of(offsets[count]), large = count > 0xFF, count_width = large ? 4 : 1;
    uint8_t *p = insert_space(out, start, 1 + (size_t)count_width + (size_t)(count + 1) * (size_t)width);
    if (!p) goto done;
    *p++ = (uint8_t)(large << 4 | (width - 1) << 2 | ARRAY);
    put_number(p, (uint64_t)count, count_width);
    p += count_width;
    for (Py_ssize_t i = 0; i <= count; i++, p += width) put_number(p, offsets[i], width);
    rc = 0;
done:
    PyMem_Free(offsets);
    return rc;
}

static int by_key(const void *a, const void *b)
{
    return PyUnicode_Compare(((const Member *)a)->key, ((const Member *)b)->key);
}

/* The id of a key in the variant's dictionary: new ones are entered, in the order they come. */
static long key_id(Out *out, PyObject *key)
{
    PyObject *known = PyDict_GetItemWithError(out->keys, key);
    if (known) return PyLong_AsLong(known);
    if (PyErr_Occurred()) return -1;
    PyObject *fresh = PyLong_FromSsize_t(PyDict_GET_SIZE(out->keys));
    long id = fresh && PyDict_SetItem(out->keys, key, fresh) == 0 ? PyLong_AsLong(fresh) : -1;
    Py_XDECREF(fresh);
    return id;
}

static int put_object(Out *out, PyObject *dict)
{
    Py_ssize_t count = PyDict_GET_SIZE(dict), at = 0, i = 0;
    size_t start = out->size;
    Member *members = PyMem_Malloc(sizeof(Member) * (size_t)(count + 1));
    PyObject *key, *value;
    uint32_t id_max = 0;
    int rc = -1;
    if (!members) { PyErr_NoMemory(); return -1; }
    while (PyDict_Next(dict, &at, &key, &value)) {
        if (!PyUnicode_Check(key)) {
            PyErr_SetString(PyExc_TypeError, "an object's keys are text");
            goto done;
        }
        members[i++] = (Member){key, 0, 0, value};
    }
    qsort(members, (size_t)count, sizeof(Member), by_key);
    for (i = 0; i < count; i++) {
        long id = key_id(out, members[i].key);
        if (id < 0) goto done;
        members[i].id = (uint32_t)id;
        if (members[i].id > id_max) id_max = members[i].id;
    }
    for (i = 0; i < count; i++) {
        members[i].offset = (uint32_t)(out->size - start);
        if (put_value(out, members[i].value) < 0) goto done;
    }
    size_t data = out->size - start;
    int width = width_of(data), id_width = width_of(id_max), large = count > 0xFF;
    size_t count_width = large ? 4 : 1;
    size_t header = 1 + count_width + (size_t)count * (size_t)id_width + (size_t)(count + 1) * (size_t)width;
    uint8_t *p = insert_space(out, start, header);
    if (!p) goto done;
    *p++ = (uint8_t)(large << 6 | (id_width - 1) << 4 | (width - 1) << 2 | OBJECT);
    put_number(p, (uint64_t)count, count_width);
    p += count_width;
    for (i = 0; i < count; i++, p += id_width) put_number(p, members[i].id, id_width);
    for (i = 0; i < count; i++, p += width) put_number(p, members[i].offset, width);
    put_number(p, data, width);
    rc = 0;
done:
    PyMem_Free(members);
    return rc;
}

static int put_value(Out *out, PyObject *value)
{
    if (PyUnicode_Check(value)) return put_text(out, value);
    if (PyBool_Check(value)) return put_primitive(out, value == Py_True ? K_TRUE : K_FALSE, "", 0);
    if (PyLong_Check(value)) return put_integer(out, value);
    if (PyFloat_Check(value)) {
        double real = PyFloat_AS_DOUBLE(value);
        return put_primitive(out, K_DOUBLE, &real, 8);
    }
    if (value == Py_None) return put_primitive(out, K_NULL, "", 0);
    if (!PyDict_Check(value) && !PyList_Check(value)) {
        PyErr_Format(PyExc_TypeError, "%R is no JSON value", value);
        return -1;
    }
    if (Py_EnterRecursiveCall(" in a JSON value")) return -1;
    int rc = PyDict_Check(value) ? put_object(out, value) : put_array(out, value);
    Py_LeaveRecursiveCall();
    return rc;
}

/* The dictionary: header, count, offsets, then the keys in the order of their ids. */
static PyObject *make_metadata(PyObject *keys)
{
    size_t total = 0, count = (size_t)PyDict_GET_SIZE(keys);
    PyObject *key, *value;
    Py_ssize_t at = 0, size;
    while (PyDict_Next(keys, &at, &key, &value)) {
        if (!PyUnicode_AsUTF8AndSize(key, &size)) return NULL;
        total += (size_t)size;
    }
    int width = width_of(total > count ? total : count);
    size_t whole = 1 + (size_t)width * (count + 2) + total;
    if (whole > VARIANT_BYTES_MAX) {
        PyErr_SetString(PyExc_OverflowError, "the variant's dictionary is over its limit");
        return NULL;
    }
    PyObject *out = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)whole);
    if (!out) return NULL;
    uint8_t *p = (uint8_t *)PyBytes_AS_STRING(out), *text = p + 1 + (size_t)width * (count + 2);
    size_t offset = 0;
    *p++ = (uint8_t)(1 | (width - 1) << 6);
    put_number(p, count, width);
    p += width;
    for (at = 0; PyDict_Next(keys, &at, &key, &value); p += width) {
        const char *utf8 = PyUnicode_AsUTF8AndSize(key, &size);
        put_number(p, offset, width);
        memcpy(text + offset, utf8, (size_t)size);
        offset += (size_t)size;
    }
    put_number(p, offset, width);
    return out;
}

/* encode(value) -> (value bytes, metadata bytes)
 * Raises OverflowError over the limit, UnicodeEncodeError for lone surrogates, RecursionError. */
static PyObject *variant_encode(PyObject *self, PyObject *value)
{
    (void)self;
    Out out = {NULL, 0, 0, PyDict_New()};
    PyObject *result = NULL, *metadata = NULL;
    if (!out.keys) return NULL;
    if (put_value(&out, value) == 0 && (metadata = make_metadata(out.keys)))
        result = Py_BuildValue("(y#O)", (const char *)out.data, (Py_ssize_t)out.size, metadata);
    Py_XDECREF(metadata);
    PyMem_Free(out.data);
    Py_DECREF(out.keys);
    return result;
}

static PyMethodDef methods[] = {
    {"encode", variant_encode, METH_O, "A JSON value as VARIANT: (value, metadata)."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_variant", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__variant(void) { return PyModule_Create(&module); }

/* A heap of jobs or domains by (rank, time, number): 32 bytes an item instead of a tuple and its place in a list.
 *
 * Its twin is virta/journal/jobs/heap.py. Times are from -2^63 to 2^64-1, what is beyond is an error; ranks are from
 * 0 to 255. The sign of the time is the lowest bit of `rank`, so that items compare as three words. */
#ifndef VIRTA_JOURNAL_HEAP_H
#define VIRTA_JOURNAL_HEAP_H
#include "journal_shapes.h"

typedef struct { uint64_t rank, time, number; PyObject *object; } Item;
typedef struct { PyObject_HEAD Item *items; Py_ssize_t size, room; } Heap;
enum { HEAP_ROOM_MIN = 8 };

static inline int before(const Item *a, const Item *b)
{
    if (a->rank != b->rank) return a->rank < b->rank;
    if (a->time != b->time) return a->time < b->time;
    return a->number < b->number;
}

/* A time as an item has it, and 1 if it is not negative; -1 with an error set if it is out of range or no number. */
static inline int time_of(PyObject *object, uint64_t *time)
{
    int beyond;
    if (number(object, UINT64_MAX, time)) return 1;
    long long below = PyLong_AsLongLongAndOverflow(object, &beyond);
    if (!beyond) {
        *time = (uint64_t)below;
        return below >= 0 ? 1 : below == -1 && PyErr_Occurred() ? -1 : 0;
    }
    *time = PyLong_AsUnsignedLongLong(object); /* complains about what is below, too */
    return *time == UINT64_MAX && PyErr_Occurred() ? -1 : 1;
}

/* The first three words of an item; -1 with an error set if they are no numbers. */
static inline int item_of(PyObject *rank, PyObject *time, PyObject *number, Item *item)
{
    int sign = time_of(time, &item->time);
    if (sign < 0 || time_of(number, &item->number) < 0) return -1;
    long first = rank ? PyLong_AsLong(rank) : 0;
    if (first == -1 && PyErr_Occurred()) return -1;
    item->rank = (uint64_t)first << 1 | (uint64_t)sign;
    return 0;
}

static void sift_up(Item *items, Py_ssize_t at)
{
    Item item = items[at];
    while (at > 0) {
        Py_ssize_t parent = (at - 1) >> 1;
        if (!before(&item, items + parent)) break;
        items[at] = items[parent];
        at = parent;
    }
    items[at] = item;
}

static void sift_down(Item *items, Py_ssize_t size, Py_ssize_t at)
{
    Item item = items[at];
    for (Py_ssize_t child; (child = 2 * at + 1) < size; at = child) {
        if (child + 1 < size && before(items + child + 1, items + child)) child++;
        if (!before(items + child, &item)) break;
        items[at] = items[child];
    }
    items[at] = item;
}

static int heap_resize(Heap *heap, Py_ssize_t room)
{
    Item *items = PyMem_Realloc(heap->items, (size_t)room * sizeof(Item));
    if (!items) { PyErr_NoMemory(); return -1; }
    heap->items = items;
    heap->room = room;
    return 0;
}

static int heap_push(Heap *heap, const Item *item)
{
    if (heap->size == heap->room && heap_resize(heap, heap->room ? heap->room + (heap->room >> 1) : HEAP_ROOM_MIN) < 0) return -1;
    heap->items[heap->size] = *item;
    Py_INCREF(item->object);
    sift_up(heap->items, heap->size++);
    return 0;
}

/* What is taken out may be the last reference to something that looks at this heap: it is let go of at the end. */
static void heap_pop(Heap *heap)
{
    PyObject *object = heap->items[0].object;
    if (--heap->size) {
        heap->items[0] = heap->items[heap->size];
        sift_down(heap->items, heap->size, 0);
    }
    if (heap->room > 4 * HEAP_ROOM_MIN && heap->size < heap->room >> 2 && heap_resize(heap, heap->room >> 1) < 0) PyErr_Clear();
    Py_DECREF(object);
}

static void heap_replace(Heap *heap, const Item *item)
{
    PyObject *object = heap->items[0].object;
    heap->items[0] = *item;
    Py_INCREF(item->object);
    sift_down(heap->items, heap->size, 0);
    Py_DECREF(object);
}

static PyObject *item_tuple(const Item *item)
{
    PyObject *time = item->rank & 1 ? PyLong_FromUnsignedLongLong(item->time) : PyLong_FromLongLong((long long)item->time);
    return time ? Py_BuildValue("KNKO", item->rank >> 1, time, item->number, item->object) : NULL;
}

/* Only the items for which `valid` says 1; -1 is an error, and then all stay. */
static int heap_filter(Heap *heap, int (*valid)(const Item *, PyObject *), PyObject *context)
{
    Py_ssize_t size = heap->size, kept = 0, gone = 0;
    Item *items = heap->items, *left = size ? PyMem_Malloc((size_t)size * sizeof(Item)) : NULL;
    if (size && !left) { PyErr_NoMemory(); return -1; }
    /* While `valid` runs the heap is empty, so that whatever it does cannot move these. */
    heap->items = NULL;
    heap->size = heap->room = 0;
    int failed = 0;
    for (Py_ssize_t i = 0; i < size; i++) {
        int good = failed ? 1 : valid(items + i, context);
        if (good < 0) failed = good = 1;
        if (good) items[kept++] = items[i];
        else left[gone++] = items[i];
    }
    PyMem_Free(heap->items);
    heap->items = items;
    heap->size = kept;
    heap->room = size;
    if (heap_resize(heap, kept + HEAP_ROOM_MIN) < 0) {
        PyErr_Clear();
        heap->room = size;
    }
    for (Py_ssize_t i = kept / 2; i-- > 0;) sift_down(heap->items, kept, i);
    for (Py_ssize_t i = 0; i < gone; i++) Py_DECREF(left[i].object);
    PyMem_Free(left);
    return failed ? -1 : 0;
}

/* --- the type --- */

static PyObject *Heap_push(Heap *self, PyObject *const *args, Py_ssize_t count)
{
    Item item;
    if (count != 4) return PyErr_Format(PyExc_TypeError, "push takes rank, time, number and object, got %zd", count);
    if (item_of(args[0], args[1], args[2], &item) < 0) return NULL;
    item.object = args[3];
    if (heap_push(self, &item) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *Heap_first(Heap *self, PyObject *unused)
{
    (void)unused;
    if (!self->size) Py_RETURN_NONE;
    return item_tuple(self->items);
}

static PyObject *Heap_time(Heap *self, PyObject *unused)
{
    (void)unused;
    if (!self->size) Py_RETURN_NONE;
    const Item *item = self->items;
    return item->rank & 1 ? PyLong_FromUnsignedLongLong(item->time) : PyLong_FromLongLong((long long)item->time);
}

static PyObject *Heap_pop(Heap *self, PyObject *unused)
{
    (void)unused;
    if (!self->size) return PyErr_Format(PyExc_IndexError, "pop from an empty heap");
    PyObject *item = item_tuple(self->items);
    if (item) heap_pop(self);
    return item;
}

static int asked(const Item *item, PyObject *valid)
{
    PyObject *tuple = item_tuple(item);
    PyObject *said = tuple ? PyObject_CallOneArg(valid, tuple) : NULL;
    int good = said ? PyObject_IsTrue(said) : -1;
    Py_XDECREF(said);
    Py_XDECREF(tuple);
    return good;
}

static PyObject *Heap_keep(Heap *self, PyObject *valid)
{
    if (heap_filter(self, asked, valid) < 0) return NULL;
    Py_RETURN_NONE;
}

static Py_ssize_t Heap_length(Heap *self) { return self->size; }

static int Heap_traverse(Heap *self, visitproc visit, void *arg)
{
    for (Py_ssize_t i = 0; i < self->size; i++) Py_VISIT(self->items[i].object);
    return 0;
}

static int Heap_clear(Heap *self)
{
    Item *items = self->items;
    Py_ssize_t size = self->size;
    self->items = NULL;
    self->size = self->room = 0;
    for (Py_ssize_t i = 0; i < size; i++) Py_DECREF(items[i].object);
    PyMem_Free(items);
    return 0;
}

static PyObject *Heap_empty(Heap *self, PyObject *unused)
{
    (void)unused;
    Heap_clear(self);
    Py_RETURN_NONE;
}

static void Heap_dealloc(Heap *self)
{
    PyObject_GC_UnTrack(self);
    Heap_clear(self);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef heap_methods[] = {
    {"push", (PyCFunction)(void (*)(void))Heap_push, METH_FASTCALL, "Put in an object by rank, time and number."},
    {"first", (PyCFunction)Heap_first, METH_NOARGS, "The first item, left where it is; None if there is none."},
    {"time", (PyCFunction)Heap_time, METH_NOARGS, "The time of the first item; None if there is none."},
    {"pop", (PyCFunction)Heap_pop, METH_NOARGS, "Take out the first item."},
    {"keep", (PyCFunction)Heap_keep, METH_O, "Only the items a function says yes to."},
    {"clear", (PyCFunction)Heap_empty, METH_NOARGS, "Take out everything."},
    {NULL, NULL, 0, NULL},
};

static PySequenceMethods heap_sequence = {.sq_length = (lenfunc)Heap_length};

static PyTypeObject HeapType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "virta.journal._native.Heap",
    .tp_basicsize = sizeof(Heap),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "Objects by rank, time and number, the smallest first.",
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)Heap_dealloc,
    .tp_traverse = (traverseproc)Heap_traverse,
    .tp_clear = (inquiry)Heap_clear,
    .tp_methods = heap_methods,
    .tp_as_sequence = &heap_sequence,
};

#endif

/* deliver_all: hand the hits of a step to the consumers of views, as `View.deliver` does for each.
 *
 * A step reaches views and consumers that are in no cache, and every attribute of one leads to the next
 * object: the processor waits for memory most of the time. So a few views ahead are prefetched, each a
 * little further along view -> consumers -> consumer -> output. Whatever is not one consumer that keeps
 * up is left to the view. */
#ifndef VIRTA_VIEWS_DELIVER_H
#define VIRTA_VIEWS_DELIVER_H

#include "views_frames.h"

/* Return the consumer of a view that has exactly one, or NULL; borrowed. */
static PyObject *only_consumer(PyObject *view)
{
    PyObject *consumers = typed_attribute(view, s_consumers, &PyDict_Type), *key = NULL, *value;
    if (!consumers) return NULL;
    Py_ssize_t at = 0;
    if (PyDict_GET_SIZE(consumers) != 1 || !PyDict_Next(consumers, &at, &key, &value)) key = NULL;
    Py_DECREF(consumers);
    return key;
}

/* The stages of the pipeline; errors are found again when the view is delivered. */

static void prefetch_consumers(PyObject *view)
{
    PyObject *consumers = typed_attribute(view, s_consumers, &PyDict_Type);
    if (consumers) prefetch(((PyDictObject *)consumers)->ma_keys, 2);
    Py_XDECREF(consumers);
}

static void prefetch_consumer(PyObject *view)
{
    PyObject *consumer = only_consumer(view);
    if (consumer) prefetch(consumer, 2);
}

static void prefetch_output(PyObject *view)
{
    PyObject *consumer = only_consumer(view);
    PyObject *direct = consumer ? PyObject_GetAttr(consumer, s_direct) : NULL;
    if (direct) prefetch(direct, 1);
    Py_XDECREF(direct);
}

static void prefetch_transport(PyObject *view)
{
    PyObject *consumer = only_consumer(view);
    PyObject *direct = consumer ? PyObject_GetAttr(consumer, s_direct) : NULL;
    if (direct && PyTuple_Check(direct) && PyTuple_GET_SIZE(direct) == 3) {
        prefetch(PyTuple_GET_ITEM(direct, 0), 1);
        prefetch(PyTuple_GET_ITEM(direct, 1), 1);
    }
    Py_XDECREF(direct);
}

static void prefetch_stage(PyObject *views, Py_ssize_t at, void (*stage)(PyObject *))
{
    if (at < PyList_GET_SIZE(views)) stage(PyList_GET_ITEM(views, at));
    PyErr_Clear();
}

/* Write the hits of a view to its one consumer; 1: done, 0: left to the view, -1: an exception is set. */
static int deliver_direct(PyObject *view, PyObject *consumer, PyObject *now)
{
    PyObject *truncated = PyObject_GetAttr(view, s_truncated);
    if (!truncated) return -1;
    Py_DECREF(truncated);
    if (truncated != Py_False) return 0;
    PyObject *direct = PyObject_GetAttr(consumer, s_direct), *hits = NULL, *payload = NULL, *fresh = NULL;
    PyObject *put, *tag, *chunked, *written;
    int done = direct ? 0 : -1;
    if (!direct || direct == Py_None || !PyArg_ParseTuple(direct, "OSO", &put, &tag, &chunked)) goto end;
    done = -1;
    if (!(hits = typed_attribute(view, s_hits, &PyList_Type))) goto end;
    if (!(payload = make_stream(tag, hits, chunked == Py_True))) goto end;
    done = 0;
    if (payload == Py_None) goto end;
    done = -1;
    if (!(fresh = PyList_New(0)) || PyObject_SetAttr(view, s_hits, fresh) < 0) goto end;
    if (PyObject_SetAttr(consumer, s_written_at, now) < 0) goto end;
    written = PyObject_CallOneArg(put, payload);
    Py_XDECREF(written);
    done = written ? 1 : -1;
end:
    Py_XDECREF(direct);
    Py_XDECREF(hits);
    Py_XDECREF(payload);
    Py_XDECREF(fresh);
    return PyErr_Occurred() ? -1 : done;
}

static int deliver_view(PyObject *view, PyObject *now)
{
    PyObject *consumer = Py_XNewRef(only_consumer(view));
    int done = PyErr_Occurred() ? -1 : 0;
    if (consumer) done = deliver_direct(view, consumer, now);
    Py_XDECREF(consumer);
    if (!done) return call_method(view, s_deliver, now);
    return done < 0 ? -1 : 0;
}

static PyObject *native_deliver_all(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    (void)self;
    if (count != 2 || !PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "deliver_all(views: list, now)");
        return NULL;
    }
    PyObject *views = PyList_GetSlice(args[0], 0, PyList_GET_SIZE(args[0])); /* a copy */
    int failed = !views;
    for (Py_ssize_t i = 0; i < 8 && !failed; i++) prefetch_stage(views, i, prefetch_consumers);
    for (Py_ssize_t i = 0; !failed && i < PyList_GET_SIZE(views); i++) {
        prefetch_stage(views, i + 8, prefetch_consumers);
        prefetch_stage(views, i + 6, prefetch_consumer);
        prefetch_stage(views, i + 4, prefetch_output);
        prefetch_stage(views, i + 2, prefetch_transport);
        failed = deliver_view(PyList_GET_ITEM(views, i), args[1]) < 0;
    }
    Py_XDECREF(views);
    return failed ? NULL : Py_NewRef(Py_None);
}

#endif

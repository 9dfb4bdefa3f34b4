/* virta.views._native: what live views do for every event. Each function has a plain form in
 * src/virta/views. */
#include "views_changes.h"
#include "views_deliver.h"
#include "views_sets.h"
#include "views_step.h"

static PyMethodDef module_methods[] = {
    {"read_changes", (PyCFunction)(void (*)(void))native_read_changes, METH_FASTCALL,
     "read_changes(values, offset, change_type, plain) -> [(offset, change)]"},
    {"set_rows", (PyCFunction)(void (*)(void))native_set_rows, METH_FASTCALL,
     "set_rows(table, changes, found, touched, frame_type) -> (numbers, replaced, before)"},
    {"is_event", native_is_event, METH_O, "is_event(value) -> bool"},
    {"put_values", (PyCFunction)(void (*)(void))native_put_values, METH_FASTCALL,
     "put_values(cache, numbers, values)"},
    {"deliver_all", (PyCFunction)(void (*)(void))native_deliver_all, METH_FASTCALL,
     "deliver_all(views, now)"},
    {"event_stream", (PyCFunction)(void (*)(void))native_event_stream, METH_FASTCALL,
     "event_stream(tag, frames, chunked) -> bytes | None"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "virta.views._native", NULL, -1, module_methods, NULL, NULL, NULL, NULL,
};

static int add_type(PyObject *m, const char *name, PyType_Spec *spec, PyTypeObject **kept)
{
    PyObject *type = PyType_FromSpec(spec);
    if (!type) return -1;
    if (kept) Py_XSETREF(*kept, (PyTypeObject *)Py_NewRef(type));
    if (PyModule_AddObject(m, name, type) == 0) return 0;
    Py_DECREF(type);
    return -1;
}

PyMODINIT_FUNC PyInit__native(void)
{
    if (make_names() < 0) return NULL;
    PyObject *m = PyModule_Create(&module);
    if (m && add_type(m, "KeyNumbers", &numbers_spec, &key_numbers_type) == 0
        && add_type(m, "MemberSets", &sets_spec, NULL) == 0)
        return m;
    Py_XDECREF(m);
    return NULL;
}

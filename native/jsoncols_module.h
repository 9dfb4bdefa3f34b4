/* The Python side of jsoncols.c: plans from tuples, and columns given away as an ArrowArray. */

/* ---- columns to Arrow ------------------------------------------------------------------------------- */

static void release_array(struct ArrowArray *array)
{
    for (int64_t i = 0; i < array->n_children; i++) {
        struct ArrowArray *child = array->children[i];
        if (child && child->release) child->release(child);
        free(child);
    }
    for (int64_t i = 0; i < array->n_buffers; i++) free((void *)(uintptr_t)array->buffers[i]);
    free(array->children);
    free(array->buffers);
    array->release = NULL;
}

static const void *give_buffer(Buffer *b)
{
    /* Arrow asks for an address even of nothing. */
    const void *data = b->data ? b->data : calloc(1, 64);
    *b = (Buffer){NULL, 0, 0};
    return data;
}

/* Move a column's buffers into an ArrowArray; the column is empty then. 0 if memory ran out. */
static int give_column(Column *c, struct ArrowArray *out)
{
    *out = (struct ArrowArray){.length = c->length, .null_count = c->nulls, .release = release_array};
    const int is_nested = c->kind == STRUCT || c->kind == VARIANT;
    const int is_list = c->kind == LIST || c->kind == MAP;
    out->buffers = calloc(3, sizeof(void *));
    out->children = calloc((size_t)c->child_count + 1, sizeof(void *));
    if (!out->buffers || !out->children) return 0;
    out->buffers[out->n_buffers++] = give_buffer(&c->validity);
    if (has_ends(c->kind)) out->buffers[out->n_buffers++] = give_buffer(&c->ends);
    if (!is_nested && !is_list) out->buffers[out->n_buffers++] = give_buffer(&c->values);
    for (int64_t i = 0; i < out->n_buffers; i++)
        if (!out->buffers[i]) return 0;
    c->length = c->nulls = 0;
    for (int i = 0; i < c->child_count; i++) {
        if (!(out->children[i] = calloc(1, sizeof(struct ArrowArray)))) return 0;
        out->n_children++;
        if (!give_column(&c->children[i], out->children[i])) return 0;
    }
    return 1;
}

static void free_capsule(PyObject *capsule)
{
    struct ArrowArray *array = PyCapsule_GetPointer(capsule, "arrow_array");
    if (array->release) array->release(array);
    free(array);
}

/* ---- plans ------------------------------------------------------------------------------------------ */

static void free_plan(PyObject *capsule)
{
    Plan *plan = PyCapsule_GetPointer(capsule, "virta.jsoncols.plan");
    column_free(&plan->root);
    free(plan->pool);
    free(plan);
}

/* (kind, name, precision, scale, (children, ...)) */
static int read_column(PyObject *spec, Column *c)
{
    const char *name;
    Py_ssize_t size;
    PyObject *children;
    int kind;
    if (!PyArg_ParseTuple(spec, "is#iiO!", &kind, &name, &size, &c->precision, &c->scale, &PyTuple_Type,
                          &children)) return -1;
    const Py_ssize_t count = PyTuple_GET_SIZE(children);
    if (kind < 0 || kind >= KINDS || c->precision > 38 || c->scale > 38 || count > CHILDREN_MAX) {
        PyErr_SetString(PyExc_ValueError, "no such column");
        return -1;
    }
    c->kind = (enum kind)kind;
    c->name_size = (size_t)size;
    c->name = malloc((size_t)size + 1);
    c->children = calloc((size_t)count + 1, sizeof(Column));
    if (!c->name || !c->children) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(c->name, name, (size_t)size);
    for (Py_ssize_t i = 0; i < count; i++) {
        c->child_count++;
        if (read_column(PyTuple_GET_ITEM(children, i), &c->children[i]) < 0) return -1;
    }
    return 0;
}

/* plan(column, roles): the struct of the event columns, and the role of each of them. */
static PyObject *jsoncols_plan(PyObject *self, PyObject *args)
{
    PyObject *spec, *roles;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &spec, &PyTuple_Type, &roles)) return NULL;
    Plan *plan = calloc(1, sizeof(Plan));
    if (!plan) return PyErr_NoMemory();
    PyObject *capsule = PyCapsule_New(plan, "virta.jsoncols.plan", free_plan);
    if (!capsule) {
        free(plan);
        return NULL;
    }
    if (read_column(spec, &plan->root) < 0) goto fail;
    if (PyTuple_GET_SIZE(roles) != plan->root.child_count) {
        PyErr_SetString(PyExc_ValueError, "each column needs a role");
        goto fail;
    }
    for (int i = 0; i < plan->root.child_count; i++) {
        const long role = PyLong_AsLong(PyTuple_GET_ITEM(roles, i));
        if (role < 0 || role >= ROLES) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "no such role");
            goto fail;
        }
        plan->by_role[role] = &plan->root.children[i];
    }
    return capsule;
fail:
    Py_DECREF(capsule);
    return NULL;
}

/* Decode all values; the rows left over go to `left`. Returns their number, or minus an enum failure. */
static Py_ssize_t decode_rows(Plan *plan, const int32_t *ends, Py_ssize_t rows, const char *data,
                              int64_t *left)
{
    Row row = {.plan = plan};
    volatile Py_ssize_t count = 0;
    const int failure = setjmp(row.ctx.fail);
    if (failure) return -failure;
    for (Py_ssize_t i = 0; i < rows; i++)
        if (!put_row(&row, data + ends[i], (size_t)(ends[i + 1] - ends[i]))) left[count++] = i;
    return count;
}

/* decode(plan, ends, data) -> (an ArrowArray's capsule, the rows left over, the number of rows with misfits)
 * `ends` are int32 offsets into `data`, one more than there are values. */
static PyObject *jsoncols_decode(PyObject *self, PyObject *args)
{
    PyObject *capsule, *result = NULL;
    Py_buffer ends, data;
    (void)self;
    if (!PyArg_ParseTuple(args, "Oy*y*", &capsule, &ends, &data)) return NULL;
    Plan *plan = PyCapsule_GetPointer(capsule, "virta.jsoncols.plan");
    const Py_ssize_t rows = ends.len / 4 - 1;
    const int32_t *at = ends.buf;
    struct ArrowArray *array = calloc(1, sizeof(*array));
    int64_t *left = malloc(sizeof(int64_t) * (size_t)(rows > 0 ? rows : 1));
    Py_ssize_t count = -NO_MEMORY;
    if (!plan) goto done;
    int is_valid = rows >= 0 && at[0] >= 0 && at[rows] <= data.len;
    for (Py_ssize_t i = 0; is_valid && i < rows; i++) is_valid = at[i] <= at[i + 1];
    if (!is_valid) {
        PyErr_SetString(PyExc_ValueError, "the ends do not fit the data");
        goto done;
    }
    if (array && left) {
        plan->misfits = 0;
        Py_BEGIN_ALLOW_THREADS
        count = decode_rows(plan, at, rows, data.buf, left);
        Py_END_ALLOW_THREADS
        if (count >= 0 && !give_column(&plan->root, array)) count = -NO_MEMORY;
    }
    if (count < 0) {
        column_clear(&plan->root);
        if (count == -TOO_LARGE) PyErr_SetString(PyExc_OverflowError, "a column is over 2 GiB");
        else PyErr_NoMemory();
        goto done;
    }
    PyObject *given = PyCapsule_New(array, "arrow_array", free_capsule);
    if (!given) goto done;
    array = NULL;
    const Py_ssize_t left_bytes = count * (Py_ssize_t)sizeof(int64_t);
    result = Py_BuildValue("(Ny#L)", given, (const char *)left, left_bytes, plan->misfits);
done:
    if (array && array->release) array->release(array);
    free(array);
    free(left);
    PyBuffer_Release(&ends);
    PyBuffer_Release(&data);
    return result;
}

static PyMethodDef methods[] = {
    {"plan", jsoncols_plan, METH_VARARGS, "A plan for decoding: plan(column, roles)."},
    {"decode", jsoncols_decode, METH_VARARGS, "Decode values: decode(plan, ends, data)."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_jsoncols", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__jsoncols(void) { return PyModule_Create(&module); }

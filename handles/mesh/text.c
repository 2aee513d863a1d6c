/* SPDX-License-Identifier: Apache-2.0 */
#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "handles/mesh/mesh.h"

/* ---- reading ------------------------------------------------------------------------------- */

/* Text that is being read. The first fault is kept in `status`, and nothing is read after it. */
typedef struct Reader {
    const EpCall *call;
    const char *text, *at;
    EpStatus status;
} Reader;

static EpStatus expected(Reader *r, const char *what) {
    if (r->status == EP_OK)
        r->status = ep_refuse(r->call, EP_ERR_RANGE, "text",
                              "expected %s, got \"%.40s\" in \"%.200s\"", what, r->at, r->text);
    return r->status;
}

/* Skip spaces, and then `c` if it is next. Returns 1 if it is. */
static int take(Reader *r, char c) {
    while (*r->at == ' ')
        r->at++;
    if (r->status != EP_OK || *r->at != c) return 0;
    r->at += c != 0;
    return 1;
}

static int is_letter(char c) {
    return isalnum((unsigned char)c) || c == '_';
}

/* Read letters, digits and '_'. */
static void take_name(Reader *r, char name[EP_AXIS_NAME_BYTES]) {
    size_t length = 0;
    (void)take(r, 0);
    while (is_letter(r->at[length]))
        length++;
    if (r->status != EP_OK) return;
    if (!length || length >= EP_AXIS_NAME_BYTES) {
        (void)expected(r, "a name of at most 31 letters, digits and '_'");
        return;
    }
    memcpy(name, r->at, length);
    name[length] = 0;
    r->at += length;
}

static int32_t take_size(Reader *r) {
    char *end;
    (void)take(r, 0);
    long size = isdigit((unsigned char)*r->at) ? strtol(r->at, &end, 10) : 0;
    if (size < 1 || size > INT32_MAX) {
        (void)expected(r, "a size of 1 to 2147483647");
        return 1;
    }
    r->at = end;
    return (int32_t)size;
}

static EpAxisRole role_named(const char *name) {
    for (EpAxisRole role = EP_AXIS_OTHER; role <= EP_AXIS_EXPERT; role++)
        if (strcmp(name, ep_axis_role_name(role)) == 0) return role;
    return 0;
}

static EpAxis take_axis(Reader *r) {
    EpAxis axis = {.role = EP_AXIS_OTHER};
    char role[EP_AXIS_NAME_BYTES];
    take_name(r, axis.name);
    if (role_named(axis.name)) axis.role = role_named(axis.name);
    if (take(r, ':')) {
        const char *begin = r->at;
        take_name(r, role);
        if (r->status == EP_OK && !(axis.role = role_named(role))) {
            r->at = begin;
            (void)expected(r, "a role (expert, fsdp, data or other)");
        }
    }
    if (!take(r, '=')) (void)expected(r, "'=' and a size");
    axis.size = take_size(r);
    return axis;
}

static EpStatus begin(const EpCall *call, const char *text, Reader *out) {
    if (!text) return ep_refuse(call, EP_ERR_NULL, "text", "expected a pointer, got NULL");
    *out = (Reader){call, text, text, EP_OK};
    return EP_OK;
}

static EpStatus finish(Reader *r) {
    if (!take(r, 0)) (void)expected(r, "',' or the end");
    return r->status;
}

EpStatus ep_mesh_parse(const char *text, EpMesh *out) {
    EpCall call = {"ep_mesh_parse", -1};
    EpMesh mesh = EP_MESH_INIT, checked;
    Reader r;
    EP_TRY(begin(&call, text, &r));
    EP_TRY(ep_check_grown_struct(&call, "out", out, EP_FIRST_SIZE(EpMesh, grid), sizeof(*out)));
    do {
        EpAxis axis = take_axis(&r);
        if (mesh.num_axes < EP_MESH_MAX_AXES)
            mesh.axes[mesh.num_axes++] = axis;
        else
            (void)expected(&r, "at most 16 axes");
    } while (take(&r, ','));
    EP_TRY(finish(&r));
    EP_TRY(ep_mesh_read(&call, &mesh, &checked));
    ep_write_struct(out, &checked);
    return EP_OK;
}

/* Read the name of one of the mesh's axes that is not in `used`, and add it to both. */
static void take_known(Reader *r, const EpMesh *mesh, EpAxes *used, EpAxes *out) {
    char name[EP_AXIS_NAME_BYTES], what[EP_AXES_TEXT_BYTES + 32];
    EpText text = {what, sizeof(what), 0};
    (void)take(r, 0);
    const char *begin = r->at;
    int32_t axis = 0;
    take_name(r, name);
    if (r->status != EP_OK) return;
    while (axis < mesh->num_axes && strcmp(mesh->axes[axis].name, name) != 0)
        axis++;
    if (axis < mesh->num_axes && !ep_axes_have(used, axis)) {
        ep_axes_add(used, axis);
        if (out != used) ep_axes_add(out, axis);
        return;
    }
    r->at = begin;
    if (axis < mesh->num_axes) {
        (void)expected(r, "each axis once");
        return;
    }
    ep_text_add(&text, "an axis of the mesh");
    for (int32_t i = 0; i < mesh->num_axes; i++)
        ep_text_add(&text, "%s%s", i ? ", " : " (", mesh->axes[i].name);
    ep_text_add(&text, ")");
    (void)expected(r, what);
}

static int is_none(const char *at) {
    return at[0] == '_' && !is_letter(at[1]);
}

static EpAxes take_axes(Reader *r, const EpMesh *mesh, EpAxes *used) {
    EpAxes axes = {.num = 0};
    if (take(r, '(')) {
        if (take(r, ')')) return axes;
        do
            take_known(r, mesh, used, &axes);
        while (take(r, ','));
        if (!take(r, ')')) (void)expected(r, "',' or ')'");
    } else if (is_none(r->at)) {
        (void)take(r, '_');
    } else {
        take_known(r, mesh, used, &axes);
    }
    return axes;
}

EpStatus ep_mesh_axes(const EpMesh *given, const char *text, EpAxes *out) {
    EpCall call = {"ep_mesh_axes", -1};
    EpMesh mesh;
    EpAxes used = {.num = 0};
    Reader r;
    EP_TRY(ep_mesh_read(&call, given, &mesh));
    EP_TRY(begin(&call, text, &r));
    if (!out) return ep_refuse(&call, EP_ERR_NULL, "out", "expected a pointer, got NULL");
    EpAxes axes = take_axes(&r, &mesh, &used);
    EP_TRY(finish(&r));
    *out = axes;
    return EP_OK;
}

EpStatus ep_spec_parse(const EpMesh *given, const char *text, EpSpec *out) {
    EpCall call = {"ep_spec_parse", -1};
    EpMesh mesh;
    EpSpec spec = EP_SPEC_INIT;
    EpAxes used = {.num = 0};
    Reader r;
    EP_TRY(ep_mesh_read(&call, given, &mesh));
    EP_TRY(begin(&call, text, &r));
    EP_TRY(ep_check_grown_struct(&call, "out", out, EP_FIRST_SIZE(EpSpec, dims), sizeof(*out)));
    do {
        EpAxes axes = take_axes(&r, &mesh, &used);
        if (spec.ndim < EP_SPEC_MAX_DIMS)
            spec.dims[spec.ndim++] = axes;
        else
            (void)expected(&r, "at most 8 dimensions");
    } while (take(&r, ','));
    EP_TRY(finish(&r));
    ep_write_struct(out, &spec);
    return EP_OK;
}

/* ---- writing ------------------------------------------------------------------------------- */

void ep_text_add(EpText *text, const char *format, ...) {
    va_list args;
    va_start(args, format);
    size_t there = text->length < text->bytes ? text->length : text->bytes;
    int length = vsnprintf(text->out ? text->out + there : NULL, text->bytes - there, format, args);
    va_end(args);
    if (length > 0) text->length += (size_t)length;
}

EpStatus ep_text_deliver(const EpCall *call, const EpText *text, char *out, size_t bytes) {
    if (!out) return ep_refuse(call, EP_ERR_NULL, "out", "expected a pointer, got NULL");
    if (bytes <= text->length)
        return ep_refuse(call, EP_ERR_BUFFER_SIZE, "bytes", "expected at least %zu, got %zu",
                         text->length + 1, bytes);
    memcpy(out, text->out, text->length + 1);
    return EP_OK;
}

void ep_text_add_axes(EpText *text, const EpMesh *mesh, const EpAxes *axes) {
    if (!axes->num) ep_text_add(text, "_");
    if (axes->num > 1) ep_text_add(text, "(");
    for (int32_t i = 0; i < axes->num; i++)
        ep_text_add(text, "%s%s", i ? "," : "", mesh->axes[axes->axis[i]].name);
    if (axes->num > 1) ep_text_add(text, ")");
}

static void add_spec(EpText *text, const EpMesh *mesh, const EpSpec *spec) {
    for (int32_t d = 0; d < spec->ndim; d++) {
        ep_text_add(text, "%s", d ? "," : "");
        ep_text_add_axes(text, mesh, &spec->dims[d]);
    }
}

EpStatus ep_spec_format(const EpMesh *given, const EpSpec *spec, char *out, size_t bytes) {
    EpCall call = {"ep_spec_format", -1};
    EpMesh mesh;
    EpSpec checked;
    char written[EP_TEXT_BYTES];
    EpText text = {written, sizeof(written), 0};
    EP_TRY(ep_mesh_read(&call, given, &mesh));
    EP_TRY(ep_spec_read(&call, &mesh, "spec", spec, &checked));
    add_spec(&text, &mesh, &checked);
    return ep_text_deliver(&call, &text, out, bytes);
}

const char *ep_axes_text(const EpMesh *mesh, const EpAxes *axes, char out[EP_AXES_TEXT_BYTES]) {
    EpText text = {out, EP_AXES_TEXT_BYTES, 0};
    ep_text_add_axes(&text, mesh, axes);
    return out;
}

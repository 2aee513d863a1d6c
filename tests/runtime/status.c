/* SPDX-License-Identifier: Apache-2.0 */
/* The version, texts of statuses, and the last error of a thread. */
#include <pthread.h>

#include "ep/ep_mesh.h"
#include "tests/harness/check.h"

SoloTest(runtime_status, version) {
    int expected = EP_VERSION_MAJOR * 10000 + EP_VERSION_MINOR * 100 + EP_VERSION_PATCH;
    CHECK(ep_version() == expected, "%d instead of %d", ep_version(), expected);
}

typedef struct Named {
    int number;
    const char *name, *text;
} Named;

static const Named statuses[] = {
#define STATUS_NAMED(name, number, text) {number, #name, text},
    EP_STATUS_MAP(STATUS_NAMED)
#undef STATUS_NAMED
};

SoloTest(runtime_status, every_status_has_its_name_and_text) {
    for (size_t i = 0; i < sizeof(statuses) / sizeof(statuses[0]); i++) {
        const char *string = ep_status_string((EpStatus)statuses[i].number);
        size_t length = strlen(statuses[i].name);
        CHECK(strncmp(string, statuses[i].name, length) == 0 && string[length] == ':', "%s",
              string);
        CHECK(strstr(string, statuses[i].text), "%s", string);
    }
}

/* The numbers are part of the binary interface. */
SoloTest(runtime_status, numbers_are_pinned) {
    CHECK(EP_OK == 0 && EP_ERR_NULL == 1 && EP_ERR_TYPE == 5 && EP_ERR_TOKENS == 9, "moved");
    CHECK(EP_ERR_ROUTING == 13 && EP_ERR_FOREIGN == 18 && EP_ERR_TIMEOUT == 21, "moved");
    CHECK(EP_ERR_NO_MEMORY == 23 && EP_ERR_SYSTEM == 27 && EP_ERR_ABORTED == 28, "moved");
}

SoloTest(runtime_status, a_number_that_is_no_status) {
    for (int i = -1; i < 2000; i += 2001)
        CHECK(ep_status_string((EpStatus)i) && ep_status_string((EpStatus)i)[0], "status %d", i);
    CHECK(ep_status_string((EpStatus)1999) != NULL, "no text");
}

SoloCall(runtime_status, no_error_at_first,
         CHECK(strcmp(ep_last_error(), "") == 0, "'%s'", ep_last_error()));

SoloTest(runtime_status, last_error_set_by_a_bootstrap) {
    char sentence[] = "rank 3 is gone";
    CHECK_STATUS(ep_set_last_error(EP_ERR_BOOTSTRAP, sentence), EP_ERR_BOOTSTRAP);
    sentence[0] = 'x';
    CHECK(strcmp(ep_last_error(), "rank 3 is gone") == 0, "'%s'", ep_last_error());
    CHECK_STATUS(ep_set_last_error(EP_ERR_TIMEOUT, NULL), EP_ERR_TIMEOUT);
}

/* A sentence is one line, whatever text of a user it quotes. */
SoloTest(runtime_status, control_characters_are_escaped) {
    EpMesh mesh = EP_MESH_INIT;
    ep_set_last_error(EP_ERR_BOOTSTRAP, "gone\n\tat \x1b[1mhome\x7f \\n, Gr\xc3\xb6\xc3\x9f"
                                        "e");
    CHECK(strcmp(ep_last_error(), "gone\\n\\tat \\x1b[1mhome\\x7f \\n, Gr\xc3\xb6\xc3\x9f"
                                  "e") == 0,
          "%s", ep_last_error());
    CHECK_REFUSED(ep_mesh_parse("fsdp=2,\nexpert=2", &mesh), EP_ERR_RANGE,
                  "got \"\\nexpert=2\" in \"fsdp=2,\\nexpert=2\"");
    char lines[1000];
    memset(lines, '\n', sizeof(lines) - 1);
    lines[sizeof(lines) - 1] = 0;
    ep_set_last_error(EP_ERR_BOOTSTRAP, lines);
    CHECK(strlen(ep_last_error()) > 500 && !strchr(ep_last_error(), '\n'), "%s", ep_last_error());
}

/* An error longer than the buffer is truncated. */
SoloTest(runtime_status, endless_sentence) {
    size_t length = 1 << 20;
    char *sentence = malloc(length + 1);
    memset(sentence, 'a', length);
    sentence[length] = 0;
    ep_set_last_error(EP_ERR_BOOTSTRAP, sentence);
    CHECK(strncmp(ep_last_error(), sentence, 100) == 0, "%.100s", ep_last_error());
    CHECK(strlen(ep_last_error()) <= length, "too long");
    free(sentence);
}

static void *other_thread(void *arg) {
    const char **seen = arg;
    *seen = strcmp(ep_last_error(), "") == 0 ? "nothing" : "something";
    ep_set_last_error(EP_ERR_BOOTSTRAP, "of the other thread");
    return NULL;
}

SoloTest(runtime_status, each_thread_has_its_own_error) {
    const char *seen = NULL;
    pthread_t thread;
    ep_set_last_error(EP_ERR_BOOTSTRAP, "of this thread");
    pthread_create(&thread, NULL, other_thread, &seen);
    pthread_join(thread, NULL);
    CHECK(strcmp(seen, "nothing") == 0, "the other thread saw %s", seen);
    CHECK(strcmp(ep_last_error(), "of this thread") == 0, "'%s'", ep_last_error());
}

SoloTest(runtime_status, bytes_of_types) {
    static const size_t bytes[] = {0, 2, 2, 4, 1, 1, 1, 4, 8, 0};
    for (int type = 0; type < 10; type++)
        CHECK(ep_type_bytes((EpType)type) == bytes[type], "type %d: %zu", type,
              ep_type_bytes((EpType)type));
    CHECK(ep_type_bytes((EpType)-1) == 0, "type -1");
}

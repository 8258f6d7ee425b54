/* A stand-in for libnvrtc, beside the model of the driver: it compiles nothing, and answers with the names of the kernels, which the
 * model has built in. A source in which braces do not match is refused, so that a program that goes on without looking is found out. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS, OUT_OF_MEMORY, PROGRAM_CREATION_FAILURE, INVALID_INPUT, INVALID_PROGRAM, INVALID_OPTION, COMPILATION };

struct program {
    char *source, *ptx;
    const char *log;
};

#define API __attribute__((visibility("default")))

API const char *nvrtcGetErrorString(int result) { return result ? "NVRTC_ERROR (model)" : "NVRTC_SUCCESS"; }

API int nvrtcCreateProgram(struct program **out, const char *source, const char *name, int headers, const char *const *texts,
                           const char *const *names) {
    (void)name, (void)headers, (void)texts, (void)names;
    if (!out || !source) return INVALID_INPUT;
    struct program *program = calloc(1, sizeof *program);
    if (!program || !(program->source = strdup(source))) return OUT_OF_MEMORY;
    program->log = "";
    *out = program;
    return SUCCESS;
}

API int nvrtcDestroyProgram(struct program **program) {
    if (!program || !*program) return INVALID_PROGRAM;
    free((*program)->source);
    free((*program)->ptx);
    free(*program);
    *program = NULL;
    return SUCCESS;
}

API int nvrtcCompileProgram(struct program *program, int count, const char *const *options) {
    (void)count, (void)options;
    if (!program) return INVALID_PROGRAM;
    int depth = 0;
    for (const char *at = program->source; *at; at++) {
        depth += *at == '{' ? 1 : *at == '}' ? -1 : 0;
        if (depth < 0) break;
    }
    if (depth) {
        program->log = "error: braces do not match";
        return COMPILATION;
    }
    size_t size;
    FILE *text = open_memstream(&program->ptx, &size);
    if (!text) return OUT_OF_MEMORY;
    fputs(".version 6.0\n.target sm_60\n.address_size 64\n", text);
    static const char mark[] = "__global__ void ";
    for (const char *at = program->source; (at = strstr(at, mark));) {
        at += sizeof mark - 1;
        fprintf(text, ".visible .entry %.*s()\n{\nret;\n}\n", (int)strcspn(at, "( "), at);
    }
    return fclose(text) ? OUT_OF_MEMORY : SUCCESS;
}

API int nvrtcGetPTXSize(struct program *program, size_t *size) {
    if (!program || !program->ptx || !size) return INVALID_PROGRAM;
    *size = strlen(program->ptx) + 1;
    return SUCCESS;
}

API int nvrtcGetPTX(struct program *program, char *ptx) {
    if (!program || !program->ptx || !ptx) return INVALID_PROGRAM;
    strcpy(ptx, program->ptx);
    return SUCCESS;
}

API int nvrtcGetProgramLogSize(struct program *program, size_t *size) {
    if (!program || !size) return INVALID_PROGRAM;
    *size = strlen(program->log) + 1;
    return SUCCESS;
}

API int nvrtcGetProgramLog(struct program *program, char *log) {
    if (!program || !log) return INVALID_PROGRAM;
    strcpy(log, program->log);
    return SUCCESS;
}

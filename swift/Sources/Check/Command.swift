import Foundation

/// A mistake in the arguments.
struct Usage: Error {
    static let text = """
        usage: shardmill-check BUILD --requests FILE [--result FILE] [--engine coreml|pipe] [--idle FILE]
               shardmill-check read BUILD TEXTS RESULT
               shardmill-check talk BUILD TALKS RESULT
               shardmill-check tokenize TOKENIZER TEXTS RESULT
               shardmill-check texts TEXTS RESULT
               shardmill-check draw DRAWS RESULT
               shardmill-check replay KIT [RESULT] [--engine coreml|pipe]
               shardmill-check check BUILD [--engine coreml|pipe]

        Answers requests with a build, one after the other in one session.

          BUILD            a folder with model.json
          --requests FILE  a JSON list of requests: {"prompt": [TOKEN, ...]} or {"text": "..."}, and if wanted
                             max_tokens         the most tokens to generate (256)
                             temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty,
                             frequency_penalty, seed, logit_bias
                             drafter            none (which is the default), ngram, suffix, head, or recite
                             recite             the tokens that the drafter recite proposes as the text
                             adapter            the name of an adapter of the build
                             cancel_after       take so many tokens, drop the request, and go on with the next
          --result FILE    write the report there; without this option it is printed, or sent through the pipe
          --engine NAME    coreml (which is the default on a Mac), or pipe: programs run in the process at the other end
                           of standard input and output, which is swift/scripts/pipe_engine.py
          --idle FILE      run no programs: each returns zeros at once, and the logits of every token are the file's,
                           raw fp32; for the time that the host takes

        The report has, beside the tokens, the seconds on the clock, and host_seconds_per_pass: the processor's time
        that a pass takes outside programs. With the drafter head it has what the head proposed, and after how many
        tokens of the text.
        read writes what an encoder finds in each text of a JSON list: spans, shares of labels, or an embedding.
        talk has the conversations of a JSON list, {"questions": ["...", ...], "max_tokens": ...} and if wanted
        instructions, temperature and seed, as an app has them, and writes each answer and how it ended.
        tokenize writes {"ids": ..., "texts": ...}: each text of a JSON list as tokens, and these as a text.
        texts writes {"talks": ..., "answers": ...}: the text of each of "talks", {"format": NAME, "messages": [[ROLE, TEXT],
        ...]}, on the day "seconds" after 1970; and what of each of "answers", {"format": NAME, "prompt": "...", "pieces":
        ["...", ...]}, is a thought. "formats" has each format as model.json does.
        draw writes what tests compare in large numbers: tokens that are sampled from rows of logits, texts as their tokens
        come, what is wrong with builds, and the calls of functions in answers (tests/swift/test_counts.py).
        check compares each program with the results that the build carries, and says a line of each on standard error.
        The exit code is 1 if something can't be read or run, and 2 for wrong arguments.
        """

    let message: String

    init(_ message: String) { self.message = message }
}

/// What the arguments ask for.
struct Command {
    enum Engine: String { case coreml, pipe }

    let build: URL
    let requests: URL
    let result: URL?
    let engine: Engine
    let idle: URL?

    init(_ arguments: [String]) throws {
        var given: [String: String] = [:]
        var folders: [String] = []
        var rest = arguments[...]
        while let argument = rest.popFirst() {
            if !argument.hasPrefix("--") {
                folders.append(argument)
                continue
            }
            guard ["--requests", "--result", "--engine", "--idle"].contains(argument) else {
                throw Usage("there is no option \(argument)")
            }
            guard let value = rest.popFirst() else { throw Usage("\(argument) needs a value") }
            if given.updateValue(value, forKey: argument) != nil { throw Usage("\(argument) stands twice") }
        }
        guard folders.count == 1, let folder = folders.first else { throw Usage("give one build's folder") }
        guard let requests = given["--requests"] else { throw Usage("give --requests FILE") }
        #if canImport(ObjectiveC)
        let usual = Engine.coreml
        #else
        let usual = Engine.pipe
        #endif
        guard let engine = given["--engine"].map(Engine.init(rawValue:)) ?? usual else {
            throw Usage("--engine is coreml or pipe")
        }
        build = URL(fileURLWithPath: folder)
        self.requests = URL(fileURLWithPath: requests)
        result = given["--result"].map { URL(fileURLWithPath: $0) }
        self.engine = engine
        idle = given["--idle"].map { URL(fileURLWithPath: $0) }
    }
}

import AnyLanguageModel
import Shardmill

/// A build as a model of AnyLanguageModel: `LanguageModelSession(model: ShardmillAny(model))`.
///
/// Copy this file into an app that depends on https://github.com/huggingface/AnyLanguageModel, version 0.8. It answers
/// with text; other types, tools and images are refused. What the cache holds of the session's transcript is not run
/// again.
struct ShardmillAny: LanguageModel {
    /// It is always available; what is wrong with a build shows when the build is opened.
    typealias UnavailableReason = Never

    private let model: ShardmillModel

    /// Answer with a model.
    init(_ model: ShardmillModel) { self.model = model }

    /// Load the model in a task of its own.
    func prewarm(for session: LanguageModelSession, promptPrefix: Prompt?) {
        Task { [model] in for try await _ in model.prewarm() {} }
    }

    /// Answer the session's last prompt.
    func respond<Content>(
        within session: LanguageModelSession, to prompt: Prompt, generating type: Content.Type,
        includeSchemaInPrompt: Bool, options: GenerationOptions
    ) async throws -> LanguageModelSession.Response<Content> where Content: Generable {
        var text = ""
        for try await piece in try pieces(session, type, options) { text += piece }
        let raw = GeneratedContent(text)
        return LanguageModelSession.Response(content: try Content(raw), rawContent: raw, transcriptEntries: [])
    }

    /// Answer the session's last prompt; each snapshot has the text so far.
    func streamResponse<Content>(
        within session: LanguageModelSession, to prompt: Prompt, generating type: Content.Type,
        includeSchemaInPrompt: Bool, options: GenerationOptions
    ) -> sending LanguageModelSession.ResponseStream<Content> where Content: Generable {
        typealias Snapshot = LanguageModelSession.ResponseStream<Content>.Snapshot
        let found = Result { try pieces(session, type, options) }
        return LanguageModelSession.ResponseStream(
            stream: AsyncThrowingStream<Snapshot, any Error> { stream in
                let task = Task {
                    do {
                        var text = ""
                        for try await piece in try found.get() {
                            text += piece
                            let raw = GeneratedContent(text)
                            stream.yield(Snapshot(content: try Content(raw).asPartiallyGenerated(), rawContent: raw))
                        }
                        stream.finish()
                    } catch {
                        stream.finish(throwing: error)
                    }
                }
                stream.onTermination = { _ in task.cancel() }
            })
    }

    private func pieces<Content>(
        _ session: LanguageModelSession, _ type: Content.Type, _ options: GenerationOptions
    ) throws -> TextPieces {
        if type != String.self { throw ShardmillAnyError.notSupported("answers of the type \(type)") }
        if !session.tools.isEmpty { throw ShardmillAnyError.notSupported("tools") }
        let messages = try session.transcript.compactMap(message)
        return model.answer(
            to: messages,
            options: ShardmillOptions(
                maxTokens: options.maximumResponseTokens ?? 512, temperature: options.temperature ?? 0))
    }

    private func message(_ entry: Transcript.Entry) throws -> Message? {
        switch entry {
        case .instructions(let entry): Message(.system, try text(entry.segments))
        case .prompt(let entry): Message(.user, try text(entry.segments))
        case .response(let entry): Message(.assistant, try text(entry.segments))
        default: nil
        }
    }

    private func text(_ segments: [Transcript.Segment]) throws -> String {
        try segments.map { segment in
            guard case .text(let text) = segment else {
                throw ShardmillAnyError.notSupported("segments that are no text")
            }
            return text.content
        }.joined()
    }
}

/// What a build does not do in a session.
enum ShardmillAnyError: Error, Equatable, CustomStringConvertible {
    /// The session asked for something else than text.
    case notSupported(String)

    /// Say what was asked for.
    var description: String {
        switch self {
        case .notSupported(let what): "a build does not support \(what)"
        }
    }
}

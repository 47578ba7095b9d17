import Foundation
import Shardmill
import Tokenizers

/// A tokenizer of swift-transformers in place of the package's own: for a tokenizer.json that `Tokenizer` refuses, and
/// for chat templates that model.json could not put into a plain form.
///
/// Copy this file into an app that depends on https://github.com/huggingface/swift-transformers, and compare its tokens
/// with those of the Python runtime before you trust it for a model: it ignores `ignore_merges` and the behavior of
/// `Split`.
struct TransformersCodec: TextCodec {
    let tokenizer: any Tokenizers.Tokenizer

    /// Load a build's tokenizer: tokenizer.json and tokenizer_config.json of a folder.
    init(_ folder: URL) async throws { tokenizer = try await AutoTokenizer.from(modelFolder: folder) }

    func encode(_ text: String, addSpecialTokens: Bool) throws -> [Int] {
        tokenizer.encode(text: text, addSpecialTokens: addSpecialTokens)
    }

    func decode(_ tokens: [Int], skipSpecialTokens: Bool) -> String {
        tokenizer.decode(tokens: tokens, skipSpecialTokens: skipSpecialTokens)
    }

    /// Answer a conversation in the checkpoint's own chat template.
    func answer(_ model: ShardmillModel, _ messages: [Shardmill.Message]) throws -> TextPieces {
        let prompt = try tokenizer.applyChatTemplate(
            messages: messages.map { ["role": $0.role.rawValue, "content": $0.content] })
        return model.complete(prompt)
    }
}

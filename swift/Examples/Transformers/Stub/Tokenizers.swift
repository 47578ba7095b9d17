// Declarations of swift-transformers' Tokenizers (huggingface/swift-transformers@eec09bd, Tokenizer.swift), as far as
// TransformersCodec uses them, so that it type-checks where no package is fetched. No body may ever run.
@_exported import Foundation

public typealias Message = [String: any Sendable]

public protocol Tokenizer: Sendable {
    func encode(text: String, addSpecialTokens: Bool) -> [Int]
    func decode(tokens: [Int], skipSpecialTokens: Bool) -> String
    func applyChatTemplate(messages: [Message]) throws -> [Int]
}

public enum AutoTokenizer {
    public static func from(modelFolder: URL, strict: Bool = true) async throws -> any Tokenizer { fatalError() }
}

// swift-tools-version: 6.1
import PackageDescription

// A package of its own: AnyLanguageModel brings nine further packages, which an app without it should not fetch.
let package = Package(
    name: "ShardmillAny",
    platforms: [.macOS(.v15), .iOS(.v18), .visionOS(.v2)],
    products: [.library(name: "ShardmillAny", targets: ["ShardmillAny"])],
    dependencies: [
        .package(name: "Shardmill", path: ".."),
        .package(url: "https://github.com/huggingface/AnyLanguageModel", from: "0.8.0"),
    ],
    targets: [
        .target(
            name: "ShardmillAny",
            dependencies: [
                .product(name: "Shardmill", package: "Shardmill"),
                .product(name: "AnyLanguageModel", package: "AnyLanguageModel"),
            ])
    ],
    swiftLanguageModes: [.v6]
)
